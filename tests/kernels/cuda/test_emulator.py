"""The emulation of a GPU's blocks agrees with numpy, and reports what a GPU would not forgive."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.cuda.emulator import EmulationError, Program, run

SELFTEST = Path(__file__).parent / "selftest.cu"
FAULTS = range(9)


@pytest.fixture(scope="module")
def program():
    names = [
        "product_kernel",
        "bytes_kernel",
        "shuffle_kernel",
        "sum_kernel<64>",
        "convert_kernel",
        "copy_kernel",
        "busy_kernel",
        "chain_kernel",
    ]
    return Program([SELFTEST], names + [f"faulty_kernel<{fault}>" for fault in FAULTS])


def to_bf16(values):
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)


def test_the_layout_of_a_product(program):
    rng = np.random.default_rng(1)
    a, b = to_bf16(rng.normal(size=(16, 16))), to_bf16(rng.normal(size=(8, 16)))
    c = rng.normal(size=(16, 8)).astype(np.float32)
    want = c + a.double().numpy() @ b.double().numpy().T
    program.run("product_kernel", (1, 1, 1), 32, 0, (c, a, b))
    np.testing.assert_allclose(c, want, rtol=1e-6, atol=1e-6)


def bytes_case():
    """Random bytes and sums, and the three products that `bytes_kernel` makes of them."""
    rng = np.random.default_rng(9)
    a, b = rng.integers(0, 256, (16, 32), dtype=np.uint8), rng.integers(0, 256, (8, 32), dtype=np.uint8)
    c = rng.integers(-1000, 1000, (3, 16, 8), dtype=np.int32)
    right = b.view(np.int8).astype(np.int32).T
    want = c + np.stack(
        [a.astype(np.int32) @ right, a.view(np.int8).astype(np.int32) @ right, a[:, :16].astype(np.int32) @ right[:16]]
    )
    return a, b, c, want.astype(np.int32)


def test_the_layout_of_a_product_of_bytes(program):
    a, b, c, want = bytes_case()
    program.run("bytes_kernel", (1, 1, 1), 32, 0, (c, a, b))
    np.testing.assert_array_equal(c, want)


@pytest.mark.parametrize("reverse", [False, True])
def test_shuffles(program, reverse):
    values = np.arange(128, dtype=np.float32) ** 2
    out = np.zeros(384, np.float32)
    program.run("shuffle_kernel", (1, 1, 1), 128, 0, (out, values, 128, 5), reverse=reverse)
    warps = values.reshape(4, 32)
    np.testing.assert_array_equal(out[:128], np.repeat(warps.sum(axis=1), 32))
    np.testing.assert_array_equal(out[128:256], np.repeat(warps[:, 5], 32))
    np.testing.assert_array_equal(out[256:], np.repeat(warps.max(axis=1), 32))


@pytest.mark.parametrize("reverse", [False, True])
def test_barriers_and_the_last_block(program, reverse):
    values = np.arange(1000, dtype=np.float32)
    total, parts, counter = np.zeros(1, np.float32), np.zeros(16, np.float32), np.zeros(1, np.int32)
    for _ in range(2):  # the counter is as it was
        total[:] = -1
        arguments = (total, parts, counter, values, 1000)
        program.run("sum_kernel<64>", (16, 1, 1), 64, 256, arguments, reverse=reverse)
        assert total[0] == values.sum()
        assert counter[0] == 0


def test_conversions(program):
    rng = np.random.default_rng(2)
    words = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    words[:65536:16] = (np.arange(256) * 257).astype(np.uint32)  # also zeros, subnormals, infinities
    scale = 1e-3
    out = np.zeros((4096, 9), np.uint32)
    program.run("convert_kernel", (1, 1, 1), 32, 0, (out, words, 4096, scale))
    check_conversions(out, words, scale)


def check_conversions(out, words, scale):
    """Against numpy and torch; also of what a GPU made."""
    low = (words & 0xFFFF).astype(np.uint16)
    np.testing.assert_array_equal(out[:, 0].view(np.float32), low.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(out[:, 1], low.astype(np.uint32) << 16)
    number = ~np.isnan(words.view(np.float32))
    rounded = torch.from_numpy(words.view(np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    high = int(to_bf16([scale]).view(torch.int16)) << 16
    np.testing.assert_array_equal(out[number, 2], (rounded.astype(np.uint32) | high)[number])
    np.testing.assert_array_equal(out[:, 3], [permuted(int(word)) for word in words])
    both = words.astype(np.uint64) | (~words).astype(np.uint64) << np.uint64(32)
    np.testing.assert_array_equal(out[:, 4], (both >> (words % 32).astype(np.uint64)).astype(np.uint32))
    np.testing.assert_array_equal(out[:, 5], low)
    np.testing.assert_allclose(
        out[:, 6].view(np.float32), np.exp(np.float32(scale) * low.astype(np.float32)), rtol=5e-6
    )
    np.testing.assert_allclose(out[:, 7].view(np.float32), (1.0 + low) ** -0.5, rtol=1e-6)
    check_differences(out[:, 8], words)


def check_differences(found, words):
    halves = torch.from_numpy(words.view(np.int16).reshape(-1, 2)).view(torch.bfloat16)
    want = (halves.double() - torch.tensor([256.0, 2.0], dtype=torch.float64)).to(torch.bfloat16)
    numbers = ~torch.isnan(want)
    got = torch.from_numpy(found.copy().view(np.int16).reshape(-1, 2)).view(torch.bfloat16)
    assert torch.equal(got[numbers], want[numbers])


def permuted(word):
    data = word.to_bytes(4, "little") + (word ^ 0xFFFFFFFF).to_bytes(4, "little")
    nibbles = [word >> (7 + 4 * i) & 15 for i in range(4)]
    return int.from_bytes(bytes(255 * (data[n & 7] >> 7) if n & 8 else data[n & 7] for n in nibbles), "little")


def test_copies_ahead(program):
    words = np.arange(1024, dtype=np.uint32)
    out = np.zeros(512, np.uint32)
    program.run("copy_kernel", (1, 1, 1), 32, 4096, (out, words))
    np.testing.assert_array_equal(out, words[511::-1] + words[512:])


@pytest.mark.parametrize(
    ("fault", "n", "message"),
    [
        (0, 0, "wait for others|at sync_block"),
        (1, 0, "others of its warp or block are at"),
        (2, 16, "64 bytes after its shared memory|after its shared memory"),
        (2, -65, "before its shared memory"),
        (3, 16, "wrote at byte 256 of an array of 256 bytes"),
        (3, -1, "wrote at byte -4"),
        (4, 1, "load16 from .* not aligned"),
        (5, 1, "selftest.cu:.* not aligned"),
        (6, 32, "a shift by 32 bits"),
    ],
)
def test_faults_are_reported(program, fault, n, message):
    with pytest.raises(EmulationError, match=message):
        program.run(f"faulty_kernel<{fault}>", (1, 1, 1), 64, 256, (np.zeros(64, np.uint32), n))


def test_a_missing_barrier_reads_what_nobody_wrote(program):
    out = np.zeros(64, np.uint32)
    program.run("faulty_kernel<7>", (1, 1, 1), 64, 256, (out, 0))
    assert (out[:32] == 0xCDCDCDCD).all()
    assert (out[32:] == np.arange(32)[::-1]).all()
    program.run("faulty_kernel<7>", (1, 1, 1), 64, 256, (out, 0), reverse=True)
    assert (out[32:] == 0xCDCDCDCD).all()


def test_kernels_that_overlap_wait_for_the_one_before(program):
    values = np.zeros(256, np.int32)
    program.run("chain_kernel", (1, 1, 1), 256, 0, (values, 256, 7), overlaps=True)
    assert (values == 7).all()
    with pytest.raises(EmulationError, match="256 threads did not wait"):
        program.run("busy_kernel", (1, 1, 1), 256, 0, (np.zeros(256, np.float32), 1), overlaps=True)


def test_a_copy_without_a_wait_is_not_there(program):
    out = np.zeros(64, np.uint32)
    program.run("faulty_kernel<8>", (1, 1, 1), 64, 256, (out, 0))
    assert (out == 0xCDCDCDCD).all()


def test_wrong_arguments_are_refused(program):
    out = np.zeros(64, np.uint32)
    with pytest.raises(AssertionError, match="takes 2 arguments"):
        program.run("faulty_kernel<7>", (1, 1, 1), 64, 0, (out,))
    with pytest.raises(AssertionError, match="an array for 'i'"):
        program.run("faulty_kernel<7>", (1, 1, 1), 64, 0, (out, np.zeros(64)))
    with pytest.raises(AssertionError, match="for 'i'"):
        program.run("faulty_kernel<7>", (1, 1, 1), 64, 0, (out, 1.5))
    with pytest.raises(AssertionError, match="share memory"):
        program.run("shuffle_kernel", (1, 1, 1), 64, 0, (out, out[1:], 64, 0))


def test_a_launch_of_many_threads_is_fast(program):
    out = np.zeros(64 * 256, np.float32)
    start = time.perf_counter()
    program.run("busy_kernel", (64, 1, 1), 256, 0, (out, 50))
    assert (out == 50 * 16).all()
    assert time.perf_counter() - start < 20  # about 0.25 s on an idle core


def test_one_kernel_of_one_file():
    out = np.zeros(64, np.uint32)
    run(SELFTEST, "faulty_kernel<6>", (1, 1, 1), 64, 0, (out, 3))
    assert out[0] == 8


def test_it_stands_in_for_a_kernel_of_a_module(program):
    out = torch.zeros(64, dtype=torch.int32)
    program.kernel("faulty_kernel<6>", "pi").launch((1, 1, 1), 64, 0, (out, 5))
    assert out[0] == 32
    with pytest.raises(AssertionError, match="takes pi, not pp"):
        program.kernel("faulty_kernel<6>", "pp")
