"""How fast the experts of a file reach host memory, and from there the device.

Owns the measurement of `load_experts` and of copies as the executors ask for them; never runs a model.
Hazard: "cold" drops the file's page cache first, but a disk or a virtual machine's host may have one of its own.

    python bench/expert_load.py FILE [--device auto|cpu|cuda] [--rounds 3]

Prints a line per round and, as the last line, one JSON object (seconds, GB/s of expert bytes, bytes).
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from makeway.device import Device, open_device
from makeway.experts.loader import load_experts
from makeway.experts.store import ExpertStore
from makeway.gguf import GGUFFile, open_gguf
from makeway.kernels import REFERENCE
from makeway.models import load_model

N_BUFFERS = 64


def forget(file: GGUFFile) -> None:
    """Drop the file from the page cache."""
    for path in file.paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def recall(file: GGUFFile) -> None:
    """Bring the file into the page cache."""
    buffer = bytearray(16 << 20)
    for path in file.paths:
        with path.open("rb", buffering=0) as raw:
            while raw.readinto(buffer):
                pass


def cross_the_link(store: ExpertStore, device: Device) -> float:
    """Seconds in which every expert is copied into a ring of buffers, one copy each."""
    stride = max(layer.raw.shape[1] for layer in store.layers)
    ring = device.alloc(N_BUFFERS * stride)
    device.synchronize()
    began = time.perf_counter()
    n = 0
    for i, layer in enumerate(store.layers):
        for expert in range(layer.n_experts):
            start = n % N_BUFFERS * stride
            device.copy(ring[start : start + layer.expert_bytes], store.bytes_of(i, expert))
            n += 1
    device.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Rate at which experts are loaded and copied.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = open_device(args.device, None)
    times: dict[str, list[float]] = {"cold": [], "warm": [], "link": []}
    with open_gguf(args.file) as file:
        layers = load_model(file, REFERENCE, device=torch.device("cpu")).store.layers
        n_bytes = sum(layer.n_experts * layer.expert_bytes for layer in layers)
        for _ in range(args.rounds):
            forget(file)
            for kind in ("cold", "warm"):
                if kind == "warm":
                    recall(file)
                began = time.perf_counter()
                store = load_experts(file, layers, device)
                times[kind].append(time.perf_counter() - began)
                if kind == "warm":
                    times["link"].append(cross_the_link(store, device))
                memory = {"placement": store.memory.placement, "is_pinned": store.memory.is_pinned}
                store.close()
                del store
            print("  ".join(f"{kind} {seconds[-1]:6.2f} s" for kind, seconds in times.items()))
    result = {"bench": "expert_load", "device": device.name, "n_bytes": n_bytes, **memory}
    for kind, seconds in times.items():
        result[f"{kind}_s"] = round(statistics.median(seconds), 3)
        result[f"{kind}_gb_per_s"] = round(n_bytes / statistics.median(seconds) / 1e9, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
