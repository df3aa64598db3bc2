"""Every byte of the store is the file's, however it is read; what stops the reading leaves nothing behind."""

import gc
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from makeway.bench.gguf_writer import write_gguf
from makeway.device import CpuDevice
from makeway.errors import UserError
from makeway.experts import loader
from makeway.experts.loader import load_experts
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE
from makeway.models import load_model
from tests.conftest import golden_path
from tests.models.runner import CPU

FILES = (
    "qwen4exp-k96-UD-Q4_K_XL.gguf",
    "qwen3moe-k256-Q4_K_M.gguf",
    "qwen3next-base-bf16.gguf",
    "qwen35moe-base-bf16.gguf",
    "qwen3moe-base-bf16.gguf",
)
SMALL = FILES[-1]


class KeepingDevice(CpuDevice):
    """Keeps the host memory that it gave."""

    def host_alloc(self, n_bytes):
        self.memory = super().host_alloc(n_bytes)
        return self.memory


def read(path, device=None, progress=None):
    """(file, experts in the mapped file, store)"""
    file = open_gguf(path)
    mapped = load_model(file, REFERENCE, device=CPU).store
    return file, mapped, load_experts(file, mapped.layers, device or CpuDevice(), progress=progress)


def check(mapped, store):
    for i, layer in enumerate(mapped.layers):
        for expert in range(layer.n_experts):
            truth = torch.cat([weight.raw.reshape(-1) for weight in layer.of(expert)])
            assert torch.equal(store.bytes_of(i, expert), truth)


def tensors_of(file):
    return {name: (t.type, t.shape, file.bytes_of(name).tobytes()) for name, t in file.tensors.items()}


@pytest.mark.parametrize("file", FILES)
def test_every_byte_is_the_files(file):
    reports, before = [], threading.active_count()
    _, mapped, store = read(golden_path(file), progress=lambda *report: reports.append(report))
    check(mapped, store)
    done = [done for done, _ in reports]
    assert done == sorted(set(done))
    assert {total for _, total in reports} == {mapped.nbytes} == {done[-1]}
    assert threading.active_count() == before


def test_shards_are_read_like_one_file(tmp_path):
    with open_gguf(golden_path(SMALL)) as whole:
        tensors = tensors_of(whole)
        n = len(tensors)
        paths = write_gguf(
            tmp_path / "m.gguf", dict(whole.metadata), tensors, split=(0, n // 3, n // 3, n - 2 * (n // 3))
        )
    file, mapped, store = read(paths[0])
    assert len({file.tensors[name].path for layer in mapped.layers for name in layer.tensors}) == 3
    check(mapped, store)
    _, _, same = read(golden_path(SMALL))
    assert torch.equal(store.memory.tensor, same.memory.tensor)


def test_a_fused_tensor_gives_the_same_store(tmp_path):
    file, mapped, store = read(golden_path(SMALL))
    tensors = tensors_of(file)
    for i, layer in enumerate(mapped.layers):
        kind, (n_experts, ff, hidden), _ = tensors.pop(f"blk.{i}.ffn_gate_exps.weight")
        del tensors[f"blk.{i}.ffn_up_exps.weight"]
        both = torch.cat([layer.gate.raw, layer.up.raw], dim=1).contiguous().numpy().tobytes()
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = (kind, (n_experts, 2 * ff, hidden), both)
    write_gguf(tmp_path / "fused.gguf", dict(file.metadata), tensors)
    _, fused, same = read(tmp_path / "fused.gguf")
    assert fused.layers[0].tensors == ("blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight")
    check(fused, same)
    assert torch.equal(store.memory.tensor, same.memory.tensor)


@pytest.mark.parametrize(("read_bytes", "iov_max"), [(1, 1024), (50_000, 1024), (1 << 30, 5), (1 << 30, 1024)])
def test_reads_are_as_large_as_allowed(monkeypatch, read_bytes, iov_max):
    monkeypatch.setattr(loader, "READ_BYTES", read_bytes)
    monkeypatch.setattr(loader, "IOV_MAX", iov_max)
    real, sizes = os.preadv, []

    def preadv(fd, buffers, offset):
        sizes.append([buffer.nbytes for buffer in buffers])
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    file, mapped, store = read(golden_path(SMALL))
    check(mapped, store)
    assert sum(map(sum, sizes)) == mapped.nbytes
    n_bytes = file.tensors["blk.0.ffn_up_exps.weight"].n_bytes // mapped.layers[0].n_experts
    most = max(1, min(read_bytes // n_bytes, iov_max, mapped.layers[0].n_experts))
    assert max(map(len, sizes)) == most
    assert len(sizes) == 3 * len(mapped.layers) * -(-mapped.layers[0].n_experts // most)


@pytest.mark.parametrize("most", [1, 777, 5000])
def test_short_reads_go_on_where_they_stopped(monkeypatch, most):
    real, most_calls = os.preadv, 10_000 if most > 1 else 200_000

    def preadv(fd, buffers, offset):
        nonlocal most_calls
        most_calls -= 1
        assert most_calls > 0
        short, room = [], most
        for buffer in buffers:
            short.append(buffer[:room])
            room -= short[-1].nbytes
            if room == 0:
                break
        return real(fd, short, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_gguf(golden_path(SMALL)) as file:
        mapped = load_model(file, REFERENCE, device=CPU).store
        layers = mapped.layers if most > 1 else mapped.layers[:1]
        if most == 1:
            monkeypatch.setattr(loader, "READ_BYTES", 1)
        store = load_experts(file, layers, CpuDevice())
        for expert in range(layers[0].n_experts):
            truth = torch.cat([weight.raw.reshape(-1) for weight in layers[0].of(expert)])
            assert torch.equal(store.bytes_of(0, expert), truth)


def test_the_page_cache_is_dropped_behind_the_reader(monkeypatch):
    real, dropped = os.posix_fadvise, []

    def fadvise(fd, offset, n_bytes, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, n_bytes))
        real(fd, offset, n_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    file, mapped, _ = read(golden_path(SMALL))
    infos = [file.tensors[name] for layer in mapped.layers for name in layer.tensors]
    tensors = sorted((t.offset, t.n_bytes) for t in infos)
    assert sorted(dropped[: len(tensors)]) == tensors, "as soon as it is read"
    again = dropped[len(tensors) :]
    for (offset, n_bytes), (first, n_dropped) in zip(tensors, again, strict=True):
        assert first == max(0, offset - loader.PAGE_BLOCK_BYTES), "with the pages that reach over its ends"
        assert first + n_dropped == offset + n_bytes + loader.PAGE_BLOCK_BYTES


def leftovers():
    gc.collect()  # mappings of other tests
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fault", ["cut short", "gone", "unreadable"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, fault):
    path = tmp_path / "model.gguf"
    shutil.copy(golden_path(SMALL), path)
    with open_gguf(path) as file:
        mapped = load_model(file, REFERENCE, device=CPU).store
        last = max((file.tensors[n] for layer in mapped.layers for n in layer.tensors), key=lambda t: t.offset)
        before, device = leftovers(), KeepingDevice()
        if fault == "cut short":
            os.truncate(path, last.offset + 100)
            message = f"model.gguf: it ends inside tensor '{last.name}' .at byte {last.offset + 100}.; .*cut short"
        elif fault == "gone":
            path.unlink()
            message = "model.gguf: cannot be opened: No such file"
        else:
            monkeypatch.setattr(os, "preadv", lambda *_: os.read(10**6, 1))
            message = r"model.gguf: tensor 'blk.\d.ffn_\w+_exps.weight' cannot be read: Bad file descriptor"
        with pytest.raises(UserError, match=message):
            load_experts(file, mapped.layers, device)
        assert leftovers() == before
        assert device.memory.nbytes == 0


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_no_thread_and_no_memory(monkeypatch, stop):
    """The first report is interrupted while other reads are under way."""
    monkeypatch.setattr(loader, "READ_BYTES", 1)
    real, calls, stopped = os.preadv, [], threading.Event()

    def preadv(fd, buffers, offset):
        calls.append(offset)
        if len(calls) > 1:
            stopped.wait(10)
        return real(fd, buffers, offset)

    def progress(done, total):
        threading.Timer(0.05, stopped.set).start()
        raise stop

    monkeypatch.setattr(os, "preadv", preadv)
    with open_gguf(golden_path(SMALL)) as file:
        mapped = load_model(file, REFERENCE, device=CPU).store
        before, device = leftovers(), KeepingDevice()
        with pytest.raises(stop):
            load_experts(file, mapped.layers, device, progress=progress)
        stopped.wait(10)
        assert len(calls) <= 1 + loader.MAX_THREADS, "reads that had not begun never do"
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
        assert leftovers() == before
        assert device.memory.nbytes == 0


def test_loading_again_after_an_interrupt(monkeypatch):
    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(golden_path(SMALL), progress=progress)
    _, mapped, store = read(Path(golden_path(SMALL)))
    check(mapped, store)
