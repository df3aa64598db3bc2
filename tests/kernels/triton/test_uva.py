"""`makeway.bench.uva`, the copying kernel that `bench link` times; it is here for this folder's way to run kernels."""

import os
import subprocess
import sys

import pytest
import torch

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from makeway.bench.uva import WORDS, _copy_kernel
for arch in (86, 90):
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    signature = {"source": "*i64", "target": "*i64", "n_words": "i32", "WORDS": "constexpr"}
    source = ASTSource(_copy_kernel, signature, constexprs={"WORDS": WORDS}, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8})
    assert "ld.global.v2.b64" in made.asm["ptx"], "loads of 16 bytes"
print("right")
"""


def test_every_word_is_copied_and_none_beyond(device):
    from makeway.bench.uva import kernel_copy

    source = torch.randint(-(1 << 62), 1 << 62, (5000,))
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.zeros(5001, dtype=torch.int64, device=device)
    kernel_copy(target[:5000], source)
    assert torch.equal(target[:5000].cpu(), source)
    assert target[5000] == 0


@pytest.mark.slow
def test_it_compiles_for_both_generations_with_16_byte_loads():
    """In a process of its own: whether a kernel is interpreted is decided when it is made."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
