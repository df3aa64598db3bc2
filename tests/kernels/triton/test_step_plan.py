import pytest
import torch

from makeway.kernels.triton.step_buffers import Report, Rooms, StepBuffers
from makeway.kernels.triton.step_plan import plan_step

STRIDE = 1 << 15


def a_report(device, *, first, n_spares=2):
    """Room for four rows of two, filled with what no plan writes."""
    return Report(
        torch.tensor([first], dtype=torch.int32, device=device),
        torch.full((4, 2), 9, dtype=torch.int32, device=device),
        torch.full((n_spares,), 9, dtype=torch.int32, device=device),
    )


def test_the_plan_names_entries_spares_and_the_transient_region(device):
    rooms = Rooms(slots_at=256, slot_stride=STRIDE, transient_at=256 + 4 * STRIDE, transient_stride=STRIDE)
    buffers = StepBuffers(device, n=3, top_k=2, hidden=32, width=32)
    report = a_report(device, first=0)
    plan_step(
        buffers,
        torch.tensor([[6, 4], [3, 0], [0, 5]], device=device),
        routing=torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], device=device),
        slot_of=torch.tensor([-1, -1, -1, -1, 1, -1, -1], dtype=torch.int32, device=device),
        wanted=torch.tensor([0, 0, 0, 1, 0, 1, 1], dtype=torch.uint8, device=device),
        spares=torch.tensor([2, 3], dtype=torch.int32, device=device),
        rooms=rooms,
        report=report,
    )
    assert buffers.count.item() == 5
    assert buffers.experts.tolist() == [0, 3, 4, 5, 6, -1]
    assert buffers.missing[:5].tolist() == [1, 1, 0, 1, 1]
    assert buffers.chosen_by[:5].tolist() == [6, 2, 1, 4, 1]
    assert buffers.offsets[:5].tolist() == [
        rooms.transient_at,
        rooms.slots_at + 2 * STRIDE,
        rooms.slots_at + STRIDE,
        rooms.slots_at + 3 * STRIDE,
        rooms.transient_at + STRIDE,
    ]
    assert report.fetched.tolist() == [3, 5]
    assert report.routed.tolist() == [[6, 4], [3, 0], [0, 5], [9, 9]]
    expected = torch.zeros((5, 3))
    expected[[0, 0, 1, 2, 3, 4], [1, 2, 1, 0, 2, 0]] = torch.tensor([0.4, 0.5, 0.3, 0.2, 0.6, 0.1])
    used = expected > 0
    assert torch.equal(buffers.weights[:5, :3].cpu()[used], expected[used])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_rows_route_nowhere_and_are_reported_as_such(dtype, device):
    """A pass of two rows, the second of them padding, behind a row that was reported before."""
    rooms = Rooms(slots_at=0, slot_stride=STRIDE, transient_at=4 * STRIDE, transient_stride=STRIDE)
    buffers, report = StepBuffers(device, n=2, top_k=2, hidden=32, width=32), a_report(device, first=1, n_spares=0)
    plan_step(
        buffers,
        torch.tensor([[3, 1], [0, 1]], dtype=dtype, device=device),
        routing=torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=device),
        slot_of=torch.tensor([-1, 2, -1, -1], dtype=torch.int32, device=device),
        wanted=torch.ones(4, dtype=torch.uint8, device=device),
        spares=torch.zeros(0, dtype=torch.int32, device=device),
        rooms=rooms,
        report=report,
        live=torch.tensor([0, -1], dtype=torch.int32, device=device),
    )
    assert buffers.count.item() == 2
    assert buffers.experts.tolist() == [1, 3, -1, -1]
    assert buffers.chosen_by[:2].tolist() == [1, 1]
    assert buffers.missing[:2].tolist() == [0, 1]
    assert buffers.weights[:2, 0].tolist() == [0.25, 0.75]
    assert report.routed.tolist() == [[9, 9], [3, 1], [-1, -1], [9, 9]]


def test_buffers_are_as_large_as_the_rows_and_experts_need(device):
    buffers = StepBuffers(device, n=3, top_k=2, hidden=32, width=16)
    assert buffers.n_entries == 6
    assert buffers.hidden.shape == (2, 6, 3, 16)
    assert buffers.outputs.shape == (6, 3, 32)
    assert buffers.nbytes > buffers.hidden.nbytes + buffers.outputs.nbytes
