"""Convolution and delta rule of a step, with rows kept, replayed and dropped, against the reference."""

from dataclasses import replace

import pytest
import torch

from makeway.kernels import ConvState, DeltaState, reference
from makeway.kernels.triton.chunk_delta import CHUNK, DeltaScratch
from makeway.kernels.triton.conv import conv_step, replay_conv
from makeway.kernels.triton.delta import delta_step, replay_delta
from tests.kernels.triton.paged import apart, batch, padded

SIZES = [(9, 3), (4, 1), (0, 2)]
HEADS, K_HEADS, D_K, D_V, N_KEPT, N_PLACES = 4, 2, 16, 32, 5, 4
CHANNELS, TAPS = 150, 4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conv_state(dilation, channels=CHANNELS):
    return ConvState(randn(N_PLACES, dilation * (TAPS - 1), channels), randn(N_PLACES, N_KEPT, channels, seed=1))


def delta_state(tiled):
    return DeltaState(
        randn(N_PLACES, HEADS, D_K, D_V),
        randn(N_PLACES, N_KEPT, K_HEADS, D_K, seed=1) / 4,
        randn(N_PLACES, N_KEPT, HEADS, D_V, seed=2),
        torch.rand((N_PLACES, N_KEPT, 2, HEADS), generator=torch.Generator().manual_seed(3)),
        tiled,
    )


def on(state, device):
    fields = {
        name: apart(t.to(device), 1 if name in ("state", "tail") else 2) if isinstance(t, torch.Tensor) else t
        for name, t in vars(state).items()
    }
    return type(state)(**fields)


def tensors(state):
    return {name: t.cpu() for name, t in vars(state).items() if isinstance(t, torch.Tensor)}


def close(ours, theirs):
    for name, t in tensors(theirs).items():
        torch.testing.assert_close(tensors(ours)[name], t, rtol=1e-5, atol=1e-5)


def delta_inputs(n):
    generator = torch.Generator().manual_seed(n)
    return {
        "q": randn(n, K_HEADS, D_K, seed=4) / 4,
        "k": randn(n, K_HEADS, D_K, seed=5) / 4,
        "v": randn(n, HEADS, D_V, seed=6),
        "decay": torch.rand((n, HEADS), generator=generator),
        "beta": torch.rand((n, HEADS), generator=generator),
    }


def run_delta(inputs, state, rows, device=None, more=0, **options):
    moved = {name: padded(t, more, torch.nan).to(device) if device else t for name, t in inputs.items()}
    step = delta_step if device else reference.delta_step
    return step(moved.pop("q"), moved.pop("k"), **moved, state=state, rows=rows, **options)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dilation", [1, 3])
def test_convolution(keep, dilation, device):
    rows = batch(SIZES, device, block_tokens=16, replays=[2, 0, 5], padding=2, keep=keep)
    x, kernel = randn(6, CHANNELS, seed=2), randn(CHANNELS, TAPS, seed=3)
    theirs = conv_state(dilation)
    ours = on(theirs, device)
    wide = torch.cat((padded(x, 2, torch.nan), torch.zeros(8, 10)), dim=1).to(device)  # rows may be strided
    out = conv_step(wide[:, :CHANNELS], kernel.to(device), state=ours, rows=rows.fixed, dilation=dilation)
    expected = reference.conv_step(x, kernel, state=theirs, rows=rows.rows, dilation=dilation)
    torch.testing.assert_close(out[:6].cpu(), expected, rtol=1e-5, atol=1e-5)
    close(ours, theirs)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_delta_rule(keep, tiled, device):
    rows = batch(SIZES, device, block_tokens=16, replays=[2, 0, 5], padding=2, keep=keep)
    inputs, theirs = delta_inputs(6), delta_state(tiled)
    ours = on(theirs, device)
    out = run_delta(inputs, ours, rows.fixed, device, more=2)
    torch.testing.assert_close(out[:6].cpu(), run_delta(inputs, theirs, rows.rows), rtol=1e-5, atol=1e-5)
    close(ours, theirs)


def test_replay_alone(device):
    rows = batch(SIZES, device, block_tokens=16, replays=[2, 0, 5])
    for theirs, ours_replay, their_replay in (
        (delta_state(True), replay_delta, reference.replay_delta),
        (conv_state(3), replay_conv, reference.replay_conv),
    ):
        ours = on(theirs, device)
        ours_replay(ours, rows.fixed)
        their_replay(theirs, rows.rows)
        close(ours, theirs)


def test_a_row_has_the_same_bits_kept_and_replayed_or_run_at_once_in_any_company(device):
    inputs, kernel, x = delta_inputs(6), randn(CHANNELS, TAPS, seed=3).to(device), randn(6, CHANNELS, seed=2).to(device)
    once, conv_once = on(delta_state(True), device), on(conv_state(1), device)
    rows = batch([(9, 3), (4, 1), (0, 2)], device, block_tokens=16)
    out = run_delta(inputs, once, rows.fixed, device)
    conv_out = conv_step(x, kernel, state=conv_once, rows=rows.fixed)
    later, conv_later = on(delta_state(True), device), on(conv_state(1), device)
    first = {name: t[:3] for name, t in inputs.items()}
    kept = batch([(9, 3)], device, block_tokens=16, places=[2], keep=True)
    assert torch.equal(run_delta(first, later, kept.fixed, device), out[:3])
    assert torch.equal(conv_step(x[:3], kernel, state=conv_later, rows=kept.fixed), conv_out[:3])
    two = batch([(9, 1)], device, block_tokens=16, places=[2], replays=[2])
    third = {name: t[2:3] for name, t in inputs.items()}
    assert torch.equal(run_delta(third, later, two.fixed, device), out[2:3])
    assert torch.equal(conv_step(x[2:3], kernel, state=conv_later, rows=two.fixed), conv_out[2:3])
    assert torch.equal(later.state[2], once.state[2])
    assert torch.equal(conv_later.tail[2], conv_once.tail[2])


def test_a_chunk_of_several_sequences_goes_through_the_chunked_form(device):
    rows = batch([(5, 70), (9, 2)], device, block_tokens=16, replays=[3, 0])
    inputs, theirs = delta_inputs(72), delta_state(False)
    inputs["decay"] = inputs["decay"] ** 0.1
    ours = on(theirs, device)
    room = torch.zeros(DeltaScratch.nbytes(CHUNK, HEADS, d_k=D_K, d_v=D_V), dtype=torch.uint8, device=device)
    scratch = DeltaScratch.of(room, HEADS, d_k=D_K, d_v=D_V)
    out = run_delta(inputs, ours, rows.fixed, device, scratch=scratch).cpu()
    expected = run_delta(inputs, theirs, rows.rows)
    assert float((out - expected).norm() / expected.norm()) < 0.02
    assert float((ours.state.cpu() - theirs.state).norm() / theirs.state.norm()) < 0.02
    no_replay = batch([(5, 70), (9, 2)], device, block_tokens=16)
    exact = run_delta(inputs, on(delta_state(False), device), no_replay.fixed, device)
    expected = run_delta(inputs, delta_state(False), replace(no_replay.rows))
    torch.testing.assert_close(exact.cpu(), expected, rtol=1e-4, atol=1e-4)
