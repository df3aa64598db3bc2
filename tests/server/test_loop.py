import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from makeway import SamplingParams, UserError
from makeway.server.errors import ApiError, Failure
from makeway.server.loop import EngineLoop
from makeway.server.mailbox import Mailbox
from makeway.server.ticket import Ticket
from tests.server.engines import ScriptedEngine


@asynccontextmanager
async def looping(load, *, stop_s=5.0, **options):
    loop = EngineLoop(load, **{"max_waiting": 50} | options)
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop(stop_s)
        assert not loop._thread.is_alive()


def ticket(loop, *, client="a", mailbox=None, tokens=(65, 66, 67)):
    return Ticket(client, list(tokens), SamplingParams(), Mailbox() if mailbox is None else mailbox)


async def answer(one):
    """The text and the end of one answer."""
    text = ""
    while True:
        got = await one.mailbox.get(10)
        assert got is not None
        item = got[1]
        if isinstance(item, Failure):
            return text, item
        text += item.text
        if item.kind == "finish":
            return text, item


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


def test_answers_come_back_to_who_asked():
    engine = ScriptedEngine(lambda prompt: f"you said {prompt}")

    async def main():
        async with looping(lambda progress: engine) as loop:
            await loop.loaded()
            tickets = [ticket(loop, tokens=[65 + i], client=str(i)) for i in range(9)]
            loop.submit(tickets)
            answers = await asyncio.gather(*map(answer, tickets))
            for one, (text, end) in zip(tickets, answers, strict=True):
                assert text == f"you said {engine.tokenizer.decode(one.tokens)}"
                assert end.reason == "stop"
            await until(lambda: not engine.busy)
            assert loop.n_running == loop.n_waiting == 0
            assert loop.status["phase"] == "idle"
        assert engine.closed

    asyncio.run(main())


def test_no_more_run_than_there_are_places_and_clients_take_turns():
    engine = ScriptedEngine(lambda prompt: "x", parallel=2)

    async def main():
        async with looping(lambda progress: engine) as loop:
            await loop.loaded()
            engine.gate.clear()
            loop.submit([ticket(loop, client="greedy", tokens=[65 + i]) for i in range(6)])
            await until(lambda: loop.n_running == 2)
            last = ticket(loop, client="modest", tokens=[90])
            loop.submit([last])
            assert loop.position(last) == 1
            engine.gate.set()
            await answer(last)
            await until(lambda: not loop.n_running)
            assert engine.prompts.index(engine.tokenizer.decode([90])) in (2, 3)

    asyncio.run(main())


def test_leaving_the_queue_or_the_engine_frees_the_place_and_touches_nobody():
    engine = ScriptedEngine(lambda prompt: "a long answer " * 20, parallel=2)

    async def main():
        async with looping(lambda progress: engine) as loop:
            await loop.loaded()
            engine.gate.clear()
            tickets = [ticket(loop) for _ in range(5)]
            loop.submit(tickets)
            await until(lambda: loop.n_running == 2)
            loop.cancel(tickets[3])
            assert loop.n_waiting == 2
            loop.cancel(tickets[0])
            engine.gate.set()
            texts = await asyncio.gather(*(answer(tickets[i]) for i in (1, 2, 4)))
            assert {text for text, _ in texts} == {"a long answer " * 20}
            assert engine.cancelled == [0]
            loop.cancel(tickets[1])  # it has ended: nothing happens
            await asyncio.sleep(0.05)
            assert engine.cancelled == [0]
            assert await tickets[3].mailbox.get(0.01) is None

    asyncio.run(main())


def test_a_client_that_does_not_read_loses_its_place():
    engine = ScriptedEngine(lambda prompt: "word " * 200, step_s=0.002)

    async def main():
        async with looping(lambda progress: engine) as loop:
            await loop.loaded()
            slow = ticket(loop, mailbox=Mailbox(limit=10))
            loop.submit([slow])
            await until(lambda: engine.cancelled == [0])
            assert (await answer(slow))[1].code == "client_too_slow"

    asyncio.run(main())


def test_the_queue_is_bounded():
    engine = ScriptedEngine(lambda prompt: "x", parallel=1)

    async def main():
        async with looping(lambda progress: engine, max_waiting=3) as loop:
            await loop.loaded()
            engine.gate.clear()
            loop.submit([ticket(loop)])
            await until(lambda: loop.n_running == 1)
            loop.submit([ticket(loop) for _ in range(2)])
            with pytest.raises(ApiError) as error:
                loop.submit([ticket(loop), ticket(loop)])
            assert error.value.status == 429
            assert error.value.headers == {"retry-after": "1"}
            assert loop.n_waiting == 2
            engine.gate.set()

    asyncio.run(main())


@pytest.mark.parametrize("crash", [False, True])
def test_a_failed_engine_tells_everybody_at_once(crash):
    engine = ScriptedEngine(lambda prompt: "never", parallel=2, fail_at=4, crash=crash)

    async def main():
        async with looping(lambda progress: engine) as loop:
            await loop.loaded()
            engine.gate.clear()
            tickets = [ticket(loop) for _ in range(5)]
            loop.submit(tickets)
            engine.gate.set()
            for one in tickets:
                _, end = await answer(one)
                assert isinstance(end, Failure)
                assert ("it crashed" if crash else "a slot is torn") in end.message
            assert loop.health.state == "failed"
            assert loop.n_running == loop.n_waiting == 0
            with pytest.raises(ApiError, match="has failed") as error:
                loop.submit([ticket(loop)])
            assert error.value.status == 503
            await until(lambda: engine.closed)

    asyncio.run(main())


@pytest.mark.parametrize("crash", [False, True])
def test_a_failed_engine_comes_back_when_told_to(crash):
    engines = []

    def load(progress):
        engines.append(ScriptedEngine(lambda prompt: "fine", fail_at=2 if not engines else None, crash=crash))
        return engines[-1]

    async def main():
        async with looping(load, restart_on_failure=True) as loop:
            await loop.loaded()
            gone = ticket(loop)
            loop.submit([gone])
            assert isinstance((await answer(gone))[1], Failure)
            await until(lambda: loop.health.state == "ok")
            assert loop.health.n_restarts == 1
            one = ticket(loop)
            loop.submit([one])
            assert (await answer(one))[0] == "fine"
            # One that failed in order is rebuilt; one that crashed cannot be, and is loaded again.
            assert len(engines) == (2 if crash else 1)
            assert engines[0].n_rebuilt == (0 if crash else 1)

    asyncio.run(main())


def test_a_late_cancel_of_a_client_of_the_failed_engine_touches_nobody():
    engines = []

    def load(progress):
        engines.append(ScriptedEngine(lambda prompt: "fine " * 30, fail_at=2 if not engines else None, crash=True))
        return engines[-1]

    async def main():
        async with looping(load, restart_on_failure=True) as loop:
            await loop.loaded()
            old = ticket(loop)
            loop.submit([old])
            await answer(old)
            await until(lambda: loop.health.state == "ok")
            engines[1].gate.clear()
            new = ticket(loop)
            loop.submit([new])
            await until(lambda: new.request_id is not None)
            assert new.request_id == old.request_id
            loop.cancel(old)
            engines[1].gate.set()
            assert (await answer(new))[0] == "fine " * 30

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_the_caller_s_to_report():
    def load(progress):
        raise UserError("no such file")

    async def main():
        async with looping(load) as loop:
            with pytest.raises(UserError, match="no such file"):
                await loop.loaded()
            assert loop.health.state == "failed"
            with pytest.raises(ApiError, match="no such file"):
                loop.need_ready()

    asyncio.run(main())


def test_loading_shows_its_progress_and_can_be_stopped():
    go_on, stopped = threading.Event(), []

    def load(progress):
        progress(30, 100)
        assert go_on.wait(10)
        try:
            progress(40, 100)
        except BaseException as error:
            stopped.append(error)
            raise
        return ScriptedEngine(lambda prompt: "x")

    async def main():
        async with looping(load, stop_s=0.0) as loop:
            await until(lambda: loop.health.loaded > 0)
            assert loop.health.loaded == pytest.approx(0.3)
            with pytest.raises(ApiError, match="30%") as error:
                loop.submit([ticket(loop)])
            assert error.value.headers == {"retry-after": "5"}
            loop.stop_now()
            go_on.set()

    asyncio.run(main())
    assert "stopped while the model was loading" in str(stopped[0])


def test_stopping_lets_answers_finish_or_ends_them():
    async def stop_after(step_s, stop_s):
        engine = ScriptedEngine(lambda prompt: "word " * 10, parallel=1, step_s=step_s)
        loop = EngineLoop(lambda progress: engine, max_waiting=9)
        loop.start()
        await loop.loaded()
        tickets = [ticket(loop) for _ in range(2)]
        loop.submit(tickets)
        await until(lambda: loop.n_running == 1)
        started = time.monotonic()
        stopping = asyncio.ensure_future(loop.stop(stop_s))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="shutting down"):
            loop.submit([ticket(loop)])
        ends = [await answer(one) for one in tickets]
        await stopping
        assert not loop._thread.is_alive()
        assert engine.closed
        return ends, time.monotonic() - started

    ends, _ = asyncio.run(stop_after(0.001, 10.0))
    assert [text for text, _ in ends] == ["word " * 10] * 2
    ends, took_s = asyncio.run(stop_after(0.5, 0.3))
    assert all(end.code == "shutting_down" for _, end in ends)
    assert took_s < 8, "the answers alone take longer"
