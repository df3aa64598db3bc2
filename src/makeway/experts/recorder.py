"""Writes down what was routed, for `--trace`.

Owns the ids of the pass that is running. Never changes what is run. Hazard: the writer wants all layers of a token
together, while a model gives them layer by layer, so a pass is written when it is complete.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from makeway.experts.trace import TraceWriter


class Recorder:
    """`add` the routing of each layer under a key of the caller's, then `write` the key's tokens."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._open: dict[int, NDArray[np.int32]] = {}

    def add(self, key: int, layer: int, ids: Tensor) -> None:
        """ids [n, k] of one layer; layers that are never added count as not run."""
        header = self._writer.header
        if key not in self._open:
            self._open[key] = np.full((ids.shape[0], header.n_layers, header.top_k), -1, dtype=np.int32)
        self._open[key][:, layer] = ids.cpu().numpy()

    def write(self, key: int, phase: Literal["prefill", "decode"], *, sequence: int) -> None:
        """Append the key's tokens, which belong to one sequence, to the file."""
        self._writer.write(phase, self._open.pop(key), sequence=sequence)

    def drop(self, key: int | None = None) -> None:
        """Forget what is not written, of one key or of all: its pass was given up."""
        if key is None:
            self._open.clear()
        else:
            self._open.pop(key, None)

    def close(self) -> None:
        """Write out and close the file."""
        self._writer.close()
