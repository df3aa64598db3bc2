"""The device's work of a decode step: rows of some sequences through the trunk, and through the MTP block.

Owns nothing between two steps. Never samples, never reserves room and never decides what stands. Hazard: a step is any
number of passes and then one `end`, which lets the expert cache's policy move on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from makeway.engine.memory import EngineMemory
from makeway.experts.cached import CachedExperts
from makeway.experts.executors import Experts
from makeway.experts.recorder import Recorder
from makeway.experts.routed import RoutedInput
from makeway.kv import Batch, Segment, SequenceState
from makeway.models.base import run_trunk

Parts = list[tuple[SequenceState, list[int]]]
"""Sequences and their next tokens; KV room must be reserved."""


@dataclass(frozen=True)
class StepRows:
    """What the trunk gave: residual f32 [n, ...] after its last layer, logits f32 [n, vocab], and whose they are."""

    residual: Tensor
    logits: Tensor
    segments: tuple[Segment, ...]


class DecodeStep:
    """Passes over rows on the slots of the decode layout, in phase decode only."""

    def __init__(self, memory: EngineMemory, recorder: Recorder | None = None) -> None:
        """`recorder`: writes down what the trunk's rows are routed to."""
        self._memory = memory
        self._recorder = recorder

    def run(self, parts: Parts, *, keep_rows: bool = False, names: Sequence[int] = ()) -> StepRows:
        """The trunk over all rows; the sequences advance, or with `keep_rows` hold their rows until `accept`.

        names: a number for each part in the trace; needed when there is a recorder.
        """
        memory = self._memory
        batch = Batch.of(parts, device=memory.device.torch_device, keep_rows=keep_rows)
        h = run_trunk(memory.model, self._watched(batch), batch)
        if self._recorder is not None:
            for i, name in zip(range(len(parts)), names, strict=True):
                self._recorder.write(i, "decode", sequence=name)
        return StepRows(h, memory.model.head(h), batch.segments)

    def end(self) -> None:
        """The step is complete."""
        self._experts.end_step()

    @property
    def _experts(self) -> CachedExperts:
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
