"""Captured passes on Triton's interpreter (which captures nothing, but runs what a graph would hold), against models
run by hand on the reference."""

from unittest.mock import MagicMock

import pytest
import torch

from makeway import EngineConfig
from makeway.device import CpuDevice
from makeway.engine.decode import DecodeStep, pieces_of
from makeway.engine.memory import EngineMemory
from makeway.gguf import open_gguf
from makeway.gguf.types import GGMLType
from makeway.kernels import Rows, Span, Weight
from makeway.kv import Batch
from makeway.models.base import Lookup
from tests.conftest import golden_path
from tests.models.runner import Runner

pytest.importorskip("triton")
from makeway.engine.backend import TritonBackend
from makeway.engine.graphs import StepGraphs, _Captured, _Inputs

TOKENS = [7, 3, 11, 5, 2, 9]


@pytest.fixture
def opened(device, request):
    """Memory whose steps are captured passes, and a runner of the same model on the reference."""
    if device.type != "cpu":
        pytest.skip("bench/gpu_check.py compares captured steps on a GPU")
    path = golden_path(request.param)
    file, place = open_gguf(path), CpuDevice()
    config = EngineConfig(
        device="cpu", context=64, parallel=2, slots=2, uploads_per_layer=1, drafter="mtp", draft_depth=2, prefix_ram=0
    )
    memory = EngineMemory(file, TritonBackend(place), config, device=place)
    assert isinstance(memory.graphs, StepGraphs)
    yield memory, Runner(path)
    memory.close()
    file.close()


def close_to(found, expected, limit=2e-2):
    assert float((found - expected).norm() / expected.norm()) < limit


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("opened", ["qwen35moe-base-bf16.gguf", "qwen4exp-base-bf16.gguf"], indirect=True)
def test_a_step_remembers_and_drafts_as_the_model_run_by_hand(opened):
    memory, runner = opened
    step, n = DecodeStep(memory), len(TOKENS) - 1
    sequence, other = memory.open_sequence(), memory.open_sequence()
    for s in (sequence, other):
        s.reserve(16)
    by_hand = runner.sequence()
    residual = runner.residual(by_hand, TOKENS[:n])
    logits, trunk = runner.model.head(residual), runner.model.trunk_state(residual)

    # five rows of one sequence and one of another, padded to eight
    rows = step.run([(sequence, TOKENS[:n]), (other, TOKENS[:1])])
    close_to(rows.logits[:n], logits)
    close_to(rows.logits[n:], logits[:1])
    states = step.trunk_state(rows.residual)
    close_to(states[:n], trunk)
    shifted = torch.cat((torch.zeros_like(trunk[:1]), trunk[:-1]))
    step.remember([(sequence, TOKENS[:n])], shifted)
    step.end()
    memory.swing.decode.settle()  # reads the report
    assert memory.swing.cache.counters.misses > 0

    # two chained drafts behind them, in one step
    drafted = runner.sequence()
    runner.draft(drafted, TOKENS[:n], shifted)
    expected, state = runner.draft(drafted, [TOKENS[n]], trunk[-1:])
    found = step.draft([(sequence, [TOKENS[n]])], trunk[-1:], ahead=0)
    close_to(found.logits, expected)
    close_to(found.states, state)
    assert found.best.item() == found.logits.argmax().item()
    expected, _ = runner.draft(drafted, [4], state)
    found = step.draft([(sequence, [4])], found.states, ahead=1)
    close_to(found.logits, expected)

    # a verify step of which one row stands, then the next token
    step.run([(sequence, [TOKENS[n], 4])], keep_rows=True)
    sequence.accept(1)
    step.end()
    last = step.run([(sequence, [8])]).logits
    step.end()
    close_to(last, runner.logits([*TOKENS, 8])[-1:])
    memory.swing.cache.audit()
    for s in (sequence, other):
        s.close()


def test_inputs_of_a_pass_are_fetched_at_once_and_padded(device):
    """Three rows of two sequences in a pass of four; what stood there before is gone."""
    table = Weight(torch.arange(40, dtype=torch.uint8).view(10, 4), GGMLType.F32, 1)
    inputs = _Inputs({5: Lookup(table, 2)}, n=4, n_blocks=3, device=device)
    assert inputs.rows.row_segment.tolist() == [-1] * 4
    spans = (Span(0, 2, 6, [2, 0], 1, n_replay=1), Span(2, 1, 9, [1], 0))
    for first, used in ((7, spans), (1, spans[:1])):
        n = sum(span.n for span in used)
        positions = [span.position + i for span in used for i in range(span.n)]
        batch = Batch(torch.zeros(n), (0,) * n, (), Rows(torch.tensor(positions), used, max_keys=64), None, None)
        inputs.fill(batch, {5: table.pick(torch.arange(2 * n), torch.device("cpu"))}, first=first)
        inputs.fetch()
    rows = inputs.rows
    assert inputs.first.tolist() == [1]
    assert rows.positions.tolist() == [6, 7, 0, 0]
    assert rows.row_segment.tolist() == [0, 0, -1, -1]
    assert (rows.first_row[0].item(), rows.n_rows.tolist(), rows.places[0].item()) == (0, [2, 0, 0, 0], 1)
    assert rows.n_replay.tolist() == [1, 0, 0, 0]
    assert rows.block_tables[0, :2].tolist() == [2, 0]
    assert inputs.gathered[5].raw[:4].flatten().tolist() == list(range(16))
    assert inputs.gathered[5].raw.data_ptr() % 16 == rows.positions.data_ptr() % 16 == 0


def test_late_tokens_are_read_in_pieces():
    parts = [("a", [1, 2, 3]), ("b", [4, 5, 6, 7])]
    assert list(pieces_of(parts, 8)) == [(parts, [-3, -4])]
    assert list(pieces_of(parts, 2)) == [
        ([("a", [1, 2])], [-3]),
        ([("a", [3]), ("b", [4])], [-1, -4]),
        ([("b", [5, 6])], [-3]),
        ([("b", [7])], [-1]),
    ]
    assert list(pieces_of([], 2)) == []


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
