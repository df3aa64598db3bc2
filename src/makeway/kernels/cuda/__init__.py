"""Kernels in CUDA C++: what decode runs on a GPU where Triton cannot say what the machine should do.

Owns the list of what is compiled ahead of time; imports no CUDA package, so it imports on every machine.
Hazard: an instantiation that is missing from `all_kernels` is compiled at its first use, and no test sees it before.
"""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def all_kernels(arch: str, steps: Sequence[int] = (1, 2, 4, 8)) -> list[tuple[tuple[Path, ...], Sequence[str]]]:
    """(files, C++ names of the kernels) of each program: each type alone, and what the known models launch on a card
    of this architecture ("sm_86" or "sm_90") in steps of so many rows."""
    from makeway.gguf.types import GGMLType as G
    from makeway.kernels.cuda import experts, linear
    from makeway.kernels.triton.experts import ExpertLayout

    products = [([kind], 2560, [2560], linear.PLAIN) for kind in linear.KINDS]
    products += [
        ([G.Q4_K, G.Q4_K, G.Q6_K], 2048, [4096, 512, 512], linear.PLAIN),  # Qwen3-30B: q, k, v
        ([G.Q6_K], 2048, [151936], linear.PLAIN),  # its head
        ([G.Q5_K, G.Q4_K, G.F32, G.F32], 2560, [10240, 6144, 48, 48], linear.PLAIN),  # Flash-Next: qkv, gate, ...
        ([G.Q4_K] * 3 + [G.Q8_0] * 2, 2560, [12288, 512, 512, 128, 512], linear.PLAIN),  # q, k, v, an indexer's two
        ([G.F32, G.F32, G.Q8_0, G.Q8_0], 2560, [512, 1, 640, 640], linear.PLAIN),  # router and shared expert
        ([G.Q8_0], 640, [2560], linear.SWIGLU),  # shared down
        ([G.Q8_0], 320, [10240], linear.SILU),  # mixer up, where `mix` has no kernel
    ]
    layouts = [(ExpertLayout(G.Q4_K, G.Q4_K, G.Q5_1, 2560, 640), 10)]  # Flash-Next
    layouts += [(ExpertLayout(G.Q4_K, G.Q4_K, down, 2048, 768), 8) for down in (G.Q4_K, G.Q6_K)]  # Qwen3-30B
    max_shared = {"sm_86": linear.MAX_SHARED, "sm_90": linear.MAX_SHARED_HOPPER}[arch]
    of_products: set[str] = set()
    of_experts: set[str] = set()
    for n in steps:
        for kinds, n_cols, rows, prologue in products:
            how = linear.cut(kinds, n_cols, rows=rows, n=n, max_shared=max_shared)
            of_products.add(linear.kernel_name(kinds, how, prologue=prologue, n=n))
        of_products.add(linear.mix_kernel_name(G.Q8_0, 320, n_streams=4, n=n))  # Flash-Next: a mixer's end
        for layout, top_k in layouts:
            how_experts = experts.launches(layout, n=n, top_k=top_k, max_shared=max_shared)
            of_experts.update(experts.kernel_names(layout, how_experts))
    return [((linear.SOURCE,), sorted(of_products)), ((experts.SOURCE,), sorted(of_experts))]
