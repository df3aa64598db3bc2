"""The device's work of a decode step: rows of some sequences through the trunk, and through the MTP block.

Owns nothing between two steps. Never samples, never reserves room and never decides what stands. Hazard: a step is any
number of passes and then one `end`, which lets the expert cache's policy move on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.engine.backend import DraftOutputs, Graphs
from makeway.engine.memory import EngineMemory
from makeway.experts.executors import Experts, StepExperts
from makeway.experts.recorder import Recorder
from makeway.experts.routed import RoutedInput
from makeway.kv import Batch, Segment, SequenceState
from makeway.memory.sizes import MAX_ROWS
from makeway.models.base import run_trunk

Parts = list[tuple[SequenceState, list[int]]]
"""Sequences and their next tokens; KV room must be reserved."""


HOST = torch.device("cpu")


def pieces_of(parts: Parts, most: int) -> Iterator[tuple[Parts, list[int]]]:
    """The tokens that stand at the ends of their sequences, in order, at most `most` at a time; and where each part
    begins, counted from its sequence's length."""
    piece: Parts = []
    offsets: list[int] = []
    room = most
    for sequence, tokens in parts:
        begin = 0
        while begin < len(tokens):
            taken = tokens[begin : begin + room]
            piece.append((sequence, taken))
            offsets.append(begin - len(tokens))
            begin, room = begin + len(taken), room - len(taken)
            if room == 0:
                yield piece, offsets
                piece, offsets, room = [], [], most
    if piece:
        yield piece, offsets


@dataclass(frozen=True)
class StepRows:
    """What the trunk gave: residual f32 [n, ...] after its last layer, logits f32 [n, vocab] (on the host when captured
    steps made them), and whose they are."""

    residual: Tensor
    logits: Tensor
    segments: tuple[Segment, ...]


class DecodeStep:
    """Passes over rows on the slots of the decode layout, in phase decode only."""

    def __init__(self, memory: EngineMemory, recorder: Recorder | None = None) -> None:
        """`recorder`: writes down what rows are routed to."""
        self._memory = memory
        self._recorder = recorder
        self._drafted: dict[int, list[Tensor]] = {}  # what the MTP block's rows were routed to, by place, for the trace

    def run(self, parts: Parts, *, keep_rows: bool = False, names: Sequence[int] = ()) -> StepRows:
        """The trunk over all rows; the sequences advance, or with `keep_rows` hold their rows until `accept`.

        names: a number for each part in the trace; needed when there is a recorder.
        """
        memory = self._memory
        if memory.graphs is not None and self._recorder is None:
            return self._replay(memory.graphs, parts, keep_rows=keep_rows)
        batch = Batch.of(parts, device=memory.device.torch_device, keep_rows=keep_rows)
        h = run_trunk(memory.model, self._watched(batch), batch)
        self._record(batch, names)
        return StepRows(h, memory.model.head(h), batch.segments)

    def _replay(self, graphs: Graphs, parts: Parts, *, keep_rows: bool) -> StepRows:
        """The same as a captured step."""
        batch = Batch.of(parts, device=HOST, keep_rows=keep_rows)
        out = graphs.run(batch)
        batch.complete()
        return StepRows(out.residual, out.logits, batch.segments)

    def tail(self, sequence: SequenceState) -> Tensor:
        """What the MTP block needs of the trunk for the sequence's last token, f32 [...], in place."""
        return sequence.state.tensors["draft", self._memory.model.facts.n_layers]

    def draft(self, parts: Parts, states: Tensor, *, ahead: int) -> DraftOutputs:
        """The MTP block over the token `ahead` places behind each sequence's last one; states f32 [n, ...] of the
        places before."""
        memory, model = self._memory, self._memory.model
        if memory.graphs is not None and self._recorder is None:
            return memory.graphs.draft(Batch.of(parts, device=HOST, offset=ahead), states)
        batch = Batch.of(parts, device=memory.device.torch_device, offset=ahead)
        h = model.draft_input(batch, states)
        h, moe = model.mix(model.facts.n_layers, h, batch)
        self._experts(model.facts.n_layers, moe)
        h = model.combine(model.facts.n_layers, h, moe)
        if self._recorder is not None:
            for i, (sequence, _) in enumerate(parts):
                self._drafted.setdefault(sequence.place, []).append(moe.ids[i : i + 1])
        logits = model.draft_head(h)
        return DraftOutputs(logits, model.draft_state(h), logits.argmax(dim=-1))

    def trunk_state(self, residual: Tensor) -> Tensor:
        """What the MTP block needs of the trunk's rows, f32 [n, ...], in memory of its own."""
        state = self._memory.model.trunk_state(residual)
        return state.clone() if state is residual else state

    def remember(self, parts: Parts, states: Tensor) -> None:
        """The MTP block's keys and values of tokens that the sequences have read last; states f32 [n, ...] of the trunk
        at the places before them."""
        memory = self._memory
        if memory.graphs is None:
            offsets = [-len(tokens) for _, tokens in parts]
            batch = Batch.of(parts, device=memory.device.torch_device, offset=offsets)
            memory.model.draft_remember(batch, states)
            return
        first = 0
        for piece, offsets in pieces_of(parts, MAX_ROWS):
            batch = Batch.of(piece, device=HOST, offset=offsets)
            n = len(batch.host_tokens)
            memory.graphs.remember(batch, states[first : first + n])
            first += n

    def settle(self, sequence: SequenceState) -> None:
        """Recurrent state that waits for a replay is moved on now."""
        sequence.settle(self._memory.ops)

    def end(self) -> None:
        """The step is complete."""
        self._experts.end_step()

    @property
    def _experts(self) -> StepExperts:
        experts = self._memory.swing.decode
        assert experts is not None, "a step runs in the decode layout"
        return experts

    def _watched(self, batch: Batch) -> Experts:
        """The executor, and the trace that looks over its shoulder."""
        recorder, experts = self._recorder, self._experts
        if recorder is None:
            return experts

        def run(layer: int, moe: RoutedInput) -> None:
            for i, segment in enumerate(batch.segments):
                recorder.add(i, layer, moe.ids[segment.rows])
            experts(layer, moe)

        return run

    def _record(self, batch: Batch, names: Sequence[int]) -> None:
        """One record a sequence; its drafts' routing stands in the rows of the tokens that the MTP block read."""
        if self._recorder is None:
            return
        layer = self._memory.model.facts.n_layers
        for i, (segment, name) in enumerate(zip(batch.segments, names, strict=True)):
            drafted = self._drafted.pop(segment.sequence.place, [])
            if drafted:
                ids = torch.full((segment.n, drafted[0].shape[1]), -1, dtype=torch.int64)
                ids[: len(drafted)] = torch.cat(drafted).cpu()
                self._recorder.add(i, layer, ids)
            self._recorder.write(i, "decode", sequence=name)
