import asyncio

from makeway import Event
from makeway.server.errors import Failure
from makeway.server.mailbox import Mailbox


def token(i):
    return Event(0, "token", text=str(i), token=i)


def test_events_come_out_in_order_and_waiting_ends_in_time():
    async def main():
        box = Mailbox()
        assert await box.get(0.01) is None
        for i in range(3):
            assert box.put(i, token(i))
        assert [await box.get(1) for _ in range(3)] == [(i, token(i)) for i in range(3)]
        waiting = asyncio.ensure_future(box.get(5))
        await asyncio.sleep(0)
        box.put(7, token(7))
        assert await waiting == (7, token(7))

    asyncio.run(main())


def test_only_the_newest_progress_is_kept():
    async def main():
        box = Mailbox(limit=2)
        for n in range(100):
            assert box.put(0, Event(0, "progress", n_done=n, n_prompt=100))
        assert box.put(1, Event(1, "progress", n_done=5, n_prompt=9))
        assert len(box) == 2
        assert (await box.get())[1].n_done == 99

    asyncio.run(main())


def test_a_client_that_does_not_read_is_cut_off():
    async def main():
        box = Mailbox(limit=3)
        assert all(box.put(0, token(i)) for i in range(3))
        assert not box.put(0, token(3))
        assert not box.put(0, token(4))
        assert len(box) == 1
        _, item = await box.get()
        assert isinstance(item, Failure)
        assert item.error().code == "client_too_slow"

    asyncio.run(main())
