"""How many launches a layer of a step takes: each costs 2 to 4 us on a GPU, whatever it does."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_a_layer_launches_no_more_than_it_did():
    """In a process of its own: whether a kernel is interpreted is decided when it is made. Golden models have the real
    ones' layers; a matrix that only the reference can multiply (seven operations of torch) is one launch there."""
    names = ["qwen3moe-base-bf16.gguf", "qwen4exp-base-bf16.gguf", "qwen35moe-base-bf16.gguf"]
    command = [sys.executable, "-m", "tests.kernels.triton.count_launches", *names]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)

    def counted(name, kind, by):
        by_layer = {}
        for place, launches in found[name][by][kind]:
            reference = launches.count("torch.mm")
            by_layer[place] = len(launches) - 6 * reference
        return by_layer

    # (layer 0, the most of a layer) with matrices in CUDA C++, as on a GPU, and in Triton
    for by, first, most in (("cuda", 12, 13), ("triton", 14, 15)):
        dense = counted(names[0], "step", by)
        assert dense["layer 0"] <= first
        assert max(dense.values()) <= most  # the last layer is combined by itself
    for by, delta, attention, draft, remember in (("cuda", 17, 20, 26, 13), ("triton", 23, 28, 36, 16)):
        exp = counted(names[1], "step", by)
        assert exp["layer 0"] <= delta  # Gated DeltaNet
        assert exp["layer 3"] <= attention  # with its indexer
        assert counted(names[1], "verify", by)["layer 0"] <= delta + 1
        assert counted(names[1], "draft", by)["layer 8"] <= draft  # its output matrix and choice too
        assert counted(names[1], "remember", by)["before"] <= remember  # with the copy of its inputs
    for by, first in (("cuda", 13), ("triton", 15)):
        assert counted(names[2], "step", by)["layer 0"] <= first
        assert "torch.to_copy" not in {launch for _, launches in found[names[0]][by]["step"] for launch in launches}
