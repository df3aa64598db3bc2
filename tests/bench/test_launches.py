"""Kernels of a run: names, counts and times."""

import pytest
import torch

from makeway import UserError
from makeway.bench.launches import launches


def test_operations_are_counted_and_the_longest_stands_first():
    a = torch.randn(256, 256)

    def run():
        for _ in range(3):
            torch.mm(a, a)
        torch.relu(a[:1, :1])

    found = {launch.name: launch for launch in launches(run, torch.device("cpu"))}
    assert found["aten::mm"].n == 3
    assert found["aten::relu"].n == 1
    assert next(iter(found)) == "aten::mm"
    seconds = [launch.seconds for launch in found.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < seconds[0] < 1


def test_a_run_without_any_is_refused():
    with pytest.raises(UserError, match="--launches"):
        launches(lambda: None, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_graph_is_looked_into():
    a = torch.randn(64, 64, device="cuda")
    torch.mm(a, a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            a = torch.relu(a)
    assert sum(launch.n for launch in launches(graph.replay, torch.device("cuda"))) >= 5
