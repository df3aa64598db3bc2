from unittest.mock import MagicMock

import torch

from makeway.engine.graphs import _Captured


def test_a_captured_pass_is_replayed_whatever_it_returns(monkeypatch):
    """The pass in which the MTP block only remembers returns nothing."""
    for name in ("Stream", "stream", "current_stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for value in (None, 3):
        calls = []

        def compute(value=value, calls=calls):
            calls.append(value)
            return value

        captured = _Captured(compute, torch.device("cuda"), programs=None)
        n_calls = len(calls)
        assert n_calls == 3, "compiled, run, captured"
        assert captured.run(compute) is value
        assert len(calls) == n_calls
