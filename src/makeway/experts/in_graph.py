"""The executor of decode on a GPU: slot look-up, misses and FFN are kernels, so that a graph can hold a whole step.

Owns the buffers between a layer's kernels. Never waits inside a step: the host sends the tables before it and takes the
report after it (`step_tables.py`).
Hazard: a captured step uses what was captured: arena, tables and buffers keep their addresses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from makeway.device import Event
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.guess import Ahead, Guesser, Multiply
from makeway.experts.routed import RoutedInput
from makeway.experts.step_tables import StepTables
from makeway.kernels import Weight
from makeway.kernels.cuda import experts as cuda
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.triton import experts as kernels
from makeway.kernels.triton import step_buffers, step_plan
from makeway.kernels.triton.fetch import Source
from makeway.kernels.triton.linear import Scratch


class DeviceExperts:
    """The executor of decode. A step may be any number of passes, captured or not, of at most `most_rows` rows each;
    the passes of one layer together report at most `most_rows` rows."""

    def __init__(
        self,
        cache: ExpertCache,
        *,
        arena: Tensor,
        most_rows: int,
        multiply: Multiply,
        programs: Programs | None = None,
    ) -> None:
        """`arena` u8: all of it; slots and transient region lie where the plan puts them. `programs`: kernels in CUDA
        C++ for the layers they can run; else, and without, Triton's. `multiply`: what guesses ask a router with."""
        sizes = cache.plan.sizes
        top_k = max(layer.top_k for layer in cache.plan.layers)
        self._cache, self._arena, self._top_k = cache, arena, top_k
        most_rows = 1 << (most_rows - 1).bit_length()  # captured passes are padded
        n_guesses = cache.plan.request.guesses
        self._tables = StepTables(cache, top_k=top_k, most_rows=most_rows, n_guesses=n_guesses)
        self._guesser = None
        if n_guesses:
            rooms_at = cache.plan.decode.transient.offset + sizes.transient_experts * sizes.stride_bytes
            self._guesser = Guesser(
                n_guesses, rooms_at=rooms_at, room_bytes=sizes.stride_bytes, multiply=multiply, device=arena.device
            )
        self._first_rows = torch.arange(most_rows, dtype=torch.int32, device=arena.device)
        self._buffers: dict[int, step_buffers.StepBuffers] = {}
        self._scratch = Scratch(arena.device)
        self._cuda = None if programs is None else cuda.StepExpertKernels(arena.device, programs)
        self._is_open = False
        self._report: Event | None = None  # asked for, once the step's last pass is on its way

    def begin_pass(self, layers: slice, n: int) -> int:
        """A pass of `n` rows over `layers` comes next: the row of the report where it begins. The first pass of a step
        sends the tables to the device."""
        if not self._is_open:
            self._is_open = True
            self._tables.send()
            if self._guesser is not None:
                self._guesser.forget()
        assert self._report is None, "the step's last pass has begun"
        n_rows = self._tables.n_rows
        first = int(n_rows[layers.start])
        assert first + n <= self._first_rows.numel()
        n_rows[layers] += n
        return first

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        """A pass that is not captured."""
        self.run(layer, moe, first=self.begin_pass(slice(layer, layer + 1), moe.ids.shape[0]))

    def run(
        self,
        layer: int,
        moe: RoutedInput,
        *,
        first: int | Tensor,
        live: Tensor | None = None,
        ahead: Sequence[tuple[int, int, Weight]] = (),
    ) -> None:
        """Plan, fetch and run; nothing waits for the host. `first`: the row of the report where this pass begins, a
        captured pass reads it from an int32 [1]; `live` int32 [n]: below 0 where a row is padding. `ahead`: layers
        that this pass runs later, whose misses are guessed, the rounds' numbers (`guess.rounds_from`), and routers;
        then `end_pass` comes behind the last layer."""
        cache, tables, n = self._cache, self._tables, moe.ids.shape[0]
        if n not in self._buffers:
            gate = cache.store.layers[layer].shapes[0]
            self._buffers[n] = step_buffers.StepBuffers(
                self._arena.device, n=n, top_k=self._top_k, hidden=gate.n_cols, width=gate.n_rows
            )
        stored, buffers = cache.store.layers[layer], self._buffers[n]
        guesses, rounds = None, []
        if self._guesser is not None:
            rounds = [self._ahead(*one) for one in ahead]
            if rounds:
                self._guesser.ask(moe.x, rounds, live=live)
            guesses = self._guesser.join(layer)
        first_row = self._first_rows[first : first + 1] if isinstance(first, int) else first
        step_plan.plan_and_fetch(
            buffers,
            moe.ids,
            source=self._source(layer),
            routing=moe.weights,
            slot_of=tables.slot_of[layer],
            wanted=tables.wanted[layer],
            spares=tables.spares[layer],
            rooms=self._rooms(layer),
            report=step_buffers.Report(first_row, tables.routed[layer], tables.fetched[layer]),
            live=live,
            guesses=guesses,
        )
        if rounds:
            assert self._guesser is not None
            self._guesser.fetch(rounds)
        gate, up, down = stored.shapes
        layout = kernels.ExpertLayout(gate.type, up.type, down.type, gate.n_cols, gate.n_rows)
        if self._cuda is not None and cuda.can_run(layout):
            self._cuda.run(buffers, moe.x, self._arena, layout=layout, acc=moe.acc)
        else:
            kernels.run_experts(buffers, moe.x, self._arena, layout=layout, acc=moe.acc, scratch=self._scratch)

    def end_pass(self) -> None:
        """A pass whose misses were guessed ends: nothing it began is under way any more."""
        if self._guesser is not None:
            self._guesser.end_pass()

    def _ahead(self, layer: int, turn: int, router: Weight) -> Ahead:
        tables, rooms = self._tables, self._rooms(layer)
        return Ahead(
            layer,
            turn,
            router,
            self._cache.plan.layers[layer].top_k,
            self._source(layer),
            slot_of=tables.slot_of[layer],
            wanted=tables.wanted[layer],
            spares=tables.spares[layer],
            limit=tables.limits[layer],
            guessed=tables.guessed[layer],
            slots=(rooms.slots_at, rooms.slot_stride),
        )

    def _rooms(self, layer: int) -> step_buffers.Rooms:
        plan = self._cache.plan
        return step_buffers.Rooms(
            slots_at=plan.decode.slots.offset + plan.decode.layer_offsets[layer],
            slot_stride=plan.decode.rank_bytes,
            transient_at=plan.decode.transient.offset,
            transient_stride=plan.layers[layer].stride_bytes,
        )

    def _source(self, layer: int) -> Source:
        stored = self._cache.store.layers[layer]
        return Source(stored.raw, self._arena, -(-stored.expert_bytes // 16) * 16)

    def last_pass_runs(self) -> None:
        """The step's last pass is on its way to the device: ask for its report behind it, and meanwhile read that of
        the step before, decide about it, and tell the next step what it may be told by now."""
        if self._is_open and self._report is None:
            self._tables.fetch_report()
            self._report = self._cache.device.record_compute()
            self._decide()
            self._tables.send_ahead()

    def wait_for_last_pass(self) -> None:
        """What was asked for before `last_pass_runs` is on the host."""
        if self._report is not None:
            self._report.wait()

    def _decide(self) -> None:
        self._tables.read_report()
        self._tables.follower.decide()

    def end_step(self) -> None:
        """Wait for the step's report, which is read while the next step runs, or by `settle`."""
        if not self._is_open:
            return
        self.last_pass_runs()
        assert self._report is not None
        self._report.wait()
        self._report = None
        self._tables.end_step()
        self._is_open = False

    def settle(self) -> None:
        self._check_closed()
        self._decide()

    def make_way(self) -> None:
        """The last step's report is read behind the next step, as always; but nothing that it fetched is kept, which
        would take half a millisecond of a prompt's time."""
        self._check_closed()
        self._tables.forget_fetched()

    def _check_closed(self) -> None:
        if self._is_open:
            raise EngineFailed("experts settle between steps, and a step is open")
