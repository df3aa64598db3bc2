"""The tensors of a GGUF file as weights: looked up by name, checked for shape and type, placed where the plan says.

Owns nothing: what it gives are views. Never decodes anything but vectors. Hazard: a matrix that is not placed is a view
of the mapped file and lives only as long as the file is open.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from makeway.errors import UserError
from makeway.experts.store import ExpertMatrix, FileLayer
from makeway.gguf import GGUFFile, TensorInfo
from makeway.gguf.types import GGMLType
from makeway.kernels import Weight
from makeway.quants import decode_rows, quant_type

Place = Callable[[str, Tensor], Tensor]
"""(tensor name, its bytes u8 in the file) -> the same bytes where they are to stay."""


class WeightReader:
    """`matrix`, `vector` and `experts` raise UserError naming the file and the tensor when something is off."""

    def __init__(self, file: GGUFFile, device: torch.device, place: Place | None = None) -> None:
        """Matrices go through `place`, or stay in the mapped file; vectors are decoded once, onto `device`; experts
        always stay in the file."""
        self.file = file
        self._device = device
        self._place = place
        self._placed: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def matrix(self, name: str, shape: Sequence[int]) -> Weight:
        """A weight of `shape` = (rows, columns), as in the file."""
        info = self._info(name, shape)
        return Weight(self._placed_raw(info, shape[0]), info.type, shape[1])

    def row(self, name: str, n_cols: int) -> Weight:
        """A vector [n_cols] as a weight of one row."""
        info = self._info(name, (n_cols,))
        return Weight(self._placed_raw(info, 1), info.type, n_cols)

    def vector(self, name: str, shape: Sequence[int]) -> Tensor:
        """A small tensor as float32 of `shape`."""
        info = self._info(name, shape)
        if self._place is not None and info.type == GGMLType.F32:
            return self._placed_raw(info, 1)[0].view(torch.float32).view(tuple(shape)).to(self._device)
        return decode_rows(self._raw(info, 1)[0], info.type).reshape(tuple(shape)).to(self._device)

    def experts(self, layer: int, *, n_experts: int, hidden: int, ff: int) -> FileLayer:
        """Gate, up and down of all experts of a layer, also from a fused `ffn_gate_up_exps`."""
        prefix = f"blk.{layer}.ffn_"
        names = tuple(f"{prefix}{part}_exps.weight" for part in ("gate", "up", "down"))
        down = self._stack(names[2], (n_experts, hidden, ff))
        fused = f"{prefix}gate_up_exps.weight"
        if self.has(fused):
            names = (fused, names[2])
            both = self._stack(fused, (n_experts, 2 * ff, hidden))
            gate = ExpertMatrix(both.raw[:, :ff], both.type, hidden)
            up = ExpertMatrix(both.raw[:, ff:], both.type, hidden)
        else:
            gate = self._stack(names[0], (n_experts, ff, hidden))
            up = self._stack(names[1], (n_experts, ff, hidden))
        return FileLayer(gate, up, down, names)

    def _stack(self, name: str, shape: tuple[int, int, int]) -> ExpertMatrix:
        info = self._info(name, shape)
        raw = self._raw(info, shape[0] * shape[1])
        return ExpertMatrix(raw.view(shape[0], shape[1], -1), info.type, shape[2])

    def _info(self, name: str, shape: Sequence[int]) -> TensorInfo:
        info = self.file.get_tensor(name)
        if tuple(info.shape) != tuple(shape):
            raise UserError(
                f"{self.file.paths[0]}: tensor '{name}' has shape {list(info.shape)}, but the metadata say "
                f"{list(shape)}; convert the model again with a current converter"
            )
        quant_type(info.type, tensor=name)
        return info

    def _placed_raw(self, info: TensorInfo, n_rows: int) -> Tensor:
        """The bytes u8 [n_rows, row bytes] where they stay; a tensor that is used twice is placed once."""
        if self._place is None:
            return self._raw(info, n_rows)
        if info.name not in self._placed:
            self._placed[info.name] = self._place(info.name, self._raw(info, 1)[0])
        return self._placed[info.name].view(n_rows, -1)

    def _raw(self, info: TensorInfo, n_rows: int) -> Tensor:
        array = self.file.bytes_of(info.name)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; nothing here ever writes to a weight.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array).view(n_rows, -1)
