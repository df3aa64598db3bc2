"""What the launch of a kernel in CUDA C++ costs: the CPU's time for each, and the GPU's in a graph of many.

Owns nothing; needs a GPU. Hazard: the CPU's time depends on the machine's cores; compare on one machine only.
"""

import argparse
import time
from pathlib import Path

import torch

from makeway.kernels.cuda.compiler import Module, current_arch

SOURCE = """#include "lanes.cuh"
KERNEL(32) touch(float* x, const float* y, i64 n, i32 row, float scale, float* a, float* b, i32 c, i32 d, i32 e) {
    let_next_start();
    wait_for_previous();
    if (block_x() == 0 && thread_x() == 0) x[0] += scale;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where the source is put")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "touch.cu").write_text(SOURCE)
    start = time.perf_counter()
    module = Module.compile([folder / "touch.cu"], ["touch"], current_arch())
    print(f"compile, or read from the disk: {time.perf_counter() - start:.3f} s; {module.resources['touch']}")
    kernel = module.kernel("touch", "pplifppiii")
    x = torch.zeros(1024, device="cuda")
    arguments = (x, x, 1024, 3, 0.0, x, x, 1, 2, 3)
    for overlaps in (False, True):
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(500):
                kernel.launch((132, 1, 1), 32, 0, arguments, overlaps_previous=overlaps)
            times.append((time.perf_counter() - start) / 500)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(500):
                kernel.launch((132, 1, 1), 32, 0, arguments, overlaps_previous=overlaps)
        on_gpu = []
        for _ in range(20):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            on_gpu.append(first.elapsed_time(last) * 1e3 / 500)
        cpu, gpu = sorted(times), sorted(on_gpu)
        print(f"overlaps_previous={overlaps}, median (least .. most) of a launch:")
        print(f"  CPU {cpu[10] * 1e6:.2f} us ({cpu[0] * 1e6:.2f} .. {cpu[-1] * 1e6:.2f})")
        print(f"  GPU in a graph {gpu[10]:.2f} us ({gpu[0]:.2f} .. {gpu[-1]:.2f})")


if __name__ == "__main__":
    main()
