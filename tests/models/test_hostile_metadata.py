"""A file is untrusted: whatever numbers its header holds, loading ends in a model or in one clear UserError."""

import numpy as np
import pytest

from makeway import Engine, EngineConfig, SamplingParams, UserError
from makeway.gguf import open_gguf
from tests.conftest import golden_path

FILES = ["qwen4exp-k96-UD-Q4_K_XL.gguf", "qwen35moe-base-bf16.gguf", "qwen3moe-base-bf16.gguf"]


def numeric_keys(file):
    with open_gguf(golden_path(file)) as f:
        arch = f.get_str("general.architecture")
        for key, value in f.metadata.items():
            if key.startswith(arch) and not isinstance(value, (str, list, bool)):
                yield key


def cases():
    """Every key of every file; those that an earlier file's architecture has too are slow."""
    seen = set()
    for file in FILES:
        for key in numeric_keys(file):
            name = key.partition(".")[2]
            yield pytest.param(file, key, marks=[pytest.mark.slow] if name in seen else [])
            seen.add(name)


class Patched:
    """An open file whose metadata answer with one value changed."""

    def __init__(self, monkeypatch, key, value):
        from makeway.gguf import Metadata

        original = Metadata.__getitem__

        def changed(self, k):
            return value if k == key else original(self, k)

        monkeypatch.setattr(Metadata, "__getitem__", changed)
        values = Metadata.__init__

        def init(self, *args, **kwargs):
            values(self, *args, **kwargs)
            self._values = {**self._values, key: value}

        monkeypatch.setattr(Metadata, "__init__", init)


@pytest.mark.parametrize(("file", "key"), list(cases()))
def test_a_changed_number_is_refused_or_runs(file, key, monkeypatch):
    with open_gguf(golden_path(file)) as f:
        value = f.metadata[key]
    if isinstance(value, np.ndarray):
        zeros, ones = np.zeros_like(value), np.ones_like(value)
        changes = [value[:0], value[:1], np.concatenate((value, value)), zeros, ones, value + value.dtype.type(1)]
    elif isinstance(value, float):
        changes = [0.0, -1.0, float("nan"), float("inf"), 1e-30]
    else:
        changes = [0, 1, 2, 3, value - 1, value + 1, 2 * value, 2**31 - 1, 2**32 - 1]
    lines = []
    for change in changes:
        with monkeypatch.context() as patch:
            Patched(patch, key, change)
            try:  # either of two ends is right, so not pytest.raises
                with Engine.load(golden_path(file), EngineConfig(device="cpu", context=64)) as engine:
                    list(engine.generate([5, 6, 7, 8, 9, 10], SamplingParams(max_tokens=1)))
            except UserError as error:
                lines.append(str(error).count("\n"))
    assert not any(lines)
