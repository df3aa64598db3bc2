"""Guesses run on streams of their own: do events order all that touches the same list or room? On pretended streams."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from makeway.experts import guess
from makeway.memory.sizes import GUESS_LISTS, GUESS_ROUNDS


class Stream:
    """Knows the numbers of all operations that have ended before what it runs next begins."""

    def __init__(self, *_):
        self.seen = set()

    def wait_stream(self, other):
        self.seen |= other.seen

    def record_event(self):
        return SimpleNamespace(seen=set(self.seen))

    def wait_event(self, event):
        self.seen |= event.seen


class Order:
    """Operations as they are asked for; `races`: those that touch the same and are ordered by nothing."""

    def __init__(self, monkeypatch):
        self.streams = [Stream()]
        self.done, self.races = [], []
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.streams[-1])

    @contextmanager
    def on(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def run(self, name, *, reads=(), writes=()):
        seen = self.streams[-1].seen
        for i, (other, its_reads, its_writes) in enumerate(self.done):
            touched = set(writes) & {*its_reads, *its_writes} | set(reads) & set(its_writes)
            if touched and i not in seen:
                self.races.append((other, name, touched))
        self.done.append((name, reads, writes))
        seen.add(len(self.done) - 1)


def ask_and_run(order, monkeypatch, *, n_layers, passes):
    """What `DeviceExperts` asks of a guesser, with the kernels replaced by what they touch. A layer's experts wait for
    the copies they need by flags, not by events, so only that nobody copies over them later is looked at."""
    rounds = range(len(GUESS_ROUNDS))

    def guess_step(part, ids, *, told, earlier, **_):
        layer, turn = told
        reads = [("list", layer % GUESS_LISTS, 0)] if earlier is not None else []
        order.run(f"guess {layer}, {turn}", reads=reads, writes=[("list", layer % GUESS_LISTS, turn)])

    class Told:
        def __init__(self, layer):
            self.layer = layer

        def __getitem__(self, part):
            turn = 1 if part.start else 0
            return Filled((self.layer, turn))

    class Filled(tuple):
        __slots__ = ()

        def fill_(self, value):
            pass

    monkeypatch.setattr(guess, "route", lambda logits, n: (None, None))
    monkeypatch.setattr(guess, "guess_step", guess_step)
    device = torch.device("cpu")
    guesser = guess.Guesser(
        8, rooms_at=0, room_bytes=16, multiply=lambda x, routers: [None] * len(routers), device=device
    )
    guesser._asks._stream, guesser._fetches._stream = Stream(), Stream()
    for one in range(passes):
        for layer in range(n_layers):
            place = layer % GUESS_LISTS
            ahead = [
                SimpleNamespace(layer=to, turn=turn, router=None, top_k=1, source=None, guessed=Told(to), slot_of=None)
                for to, turn in guess.rounds_from(layer, n_layers)
            ]
            for a in ahead:
                a.wanted = a.spares = a.limit = a.slots = None
            copied = [(what, a.layer % GUESS_LISTS, a.turn) for a in ahead for what in ("list", "room")]
            monkeypatch.setattr(
                guess,
                "fetch_guesses",
                lambda lists, copied=copied, layer=layer: order.run(
                    f"copies at {layer}",
                    reads=[c for c in copied if c[0] == "list"],
                    writes=[c for c in copied if c[0] == "room"],
                ),
            )
            if ahead:
                guesser.ask(None, ahead, live=None)
            has_list = guesser.join(layer) is not None
            order.run(f"plan {layer}", reads=[("list", place, turn) for turn in rounds if has_list])
            if ahead:
                guesser.fetch(ahead)
            order.done.append((f"experts {layer}", [("room", place, turn) for turn in rounds], []))
            order.streams[0].seen.add(len(order.done) - 1)
        guesser.end_pass()
        order.run(f"end of pass {one}", reads=[("room", i, turn) for i in range(GUESS_LISTS) for turn in rounds])


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 8])
def test_events_order_all_that_touches_a_list_or_a_room(n_layers, monkeypatch):
    order = Order(monkeypatch)
    ask_and_run(order, monkeypatch, n_layers=n_layers, passes=2)
    assert order.races == []


@pytest.mark.parametrize("missing", ["wait_for", "end_pass"])
def test_a_missing_wait_is_found(missing, monkeypatch):
    if missing == "wait_for":
        monkeypatch.setattr(guess._Beside, "wait_for", lambda self, other, place: None)
    else:
        monkeypatch.setattr(guess.Guesser, "end_pass", lambda self: self.forget())
    order = Order(monkeypatch)
    ask_and_run(order, monkeypatch, n_layers=8, passes=2)
    assert order.races
