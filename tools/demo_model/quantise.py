"""ggml's own quantiser and llama.cpp's own forward pass, through the C symbols of the xllamacpp wheel.

Owns the library handle. Hazard: llama.cpp's parameter structs are passed by value; they are treated as blobs larger
than the real thing, of which only the first three integers of the context's (n_ctx, n_batch, n_ubatch) are touched.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


class Blob(ctypes.Structure):
    """Room for any parameter struct."""

    _fields_ = [("words", ctypes.c_uint64 * 64)]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


@cache
def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    for path in [*glob.glob(str(folder / "*.so")), *glob.glob(str(folder.parent / "xllamacpp*" / "*.so*"))]:
        lib = ctypes.CDLL(path)
        if hasattr(lib, "llama_decode") and hasattr(lib, "ggml_quantize_chunk"):
            return lib
    raise SystemExit("xllamacpp exports no llama_decode")


def quantise(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """float32 rows -> bytes [rows..., bytes per row]."""
    f = library().ggml_quantize_chunk
    f.restype, f.argtypes = (
        ctypes.c_size_t,
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p],
    )
    values = np.ascontiguousarray(values, dtype=np.float32)
    n_row = values.shape[-1]
    block, size = GGML_QUANT_SIZES[kind]
    out = np.zeros((*values.shape[:-1], n_row // block * size), dtype=np.uint8)
    done = f(int(kind), values.ctypes.data, out.ctypes.data, 0, values.size // n_row, n_row, None)
    assert done == out.nbytes, (done, out.nbytes)
    return out


class Llama:
    """llama.cpp on one file: logits of a token sequence, teacher-forced."""

    def __init__(self, path: Path, *, context: int = 4096) -> None:
        lib = self.lib = library()
        lib.llama_model_default_params.restype = Blob
        lib.llama_context_default_params.restype = Blob
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Blob]
        lib.llama_init_from_model.restype = ctypes.c_void_p
        lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Blob]
        lib.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        lib.llama_get_logits.argtypes = [ctypes.c_void_p]
        lib.llama_decode.restype = ctypes.c_int32
        lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
        lib.llama_free.argtypes = [ctypes.c_void_p]
        lib.llama_model_free.argtypes = [ctypes.c_void_p]
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {path}")
        params = lib.llama_context_default_params()
        head = ctypes.cast(ctypes.byref(params), ctypes.POINTER(ctypes.c_uint32))
        assert (head[1], head[2]) == (2048, 512), "another struct llama_context_params"
        head[0], head[1], head[2] = context, 512, 512
        self.context = lib.llama_init_from_model(self.model, params)
        assert self.context

    def logits(self, tokens: np.ndarray, n_vocab: int) -> np.ndarray:
        """[n, vocab] f32; only once per object (the sequence goes on)."""
        rows = []
        for i in range(0, len(tokens), 512):
            part = np.ascontiguousarray(tokens[i : i + 512], dtype=np.int32)
            want = np.ones(len(part), dtype=np.int8)
            batch = Batch(len(part), part.ctypes.data, None, None, None, None, want.ctypes.data)
            assert self.lib.llama_decode(self.context, batch) == 0
            got = np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (len(part), n_vocab))
            rows.append(got.copy())
        return np.concatenate(rows)

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
