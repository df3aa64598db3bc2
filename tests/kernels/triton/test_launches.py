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

    def counted(name, kind):
        by_layer = {}
        for place, launches in found[name][kind]:
            reference = launches.count("torch.mm")
            by_layer[place] = len(launches) - 6 * reference
        return by_layer

    dense = counted(names[0], "step")
    assert dense["layer 0"] <= 14
    assert max(dense.values()) <= 15  # the last layer is combined by itself
    exp = counted(names[1], "step")
    assert exp["layer 0"] <= 23  # Gated DeltaNet
    assert exp["layer 3"] <= 29  # attention with its indexer
    assert counted(names[1], "verify")["layer 0"] <= 24
    assert counted(names[1], "draft")["layer 8"] <= 38  # its output matrix and choice too
    assert counted(names[1], "remember")["before"] <= 15
    assert counted(names[2], "step")["layer 0"] <= 17
    assert "torch.to_copy" not in {launch for _, launches in found[names[0]]["step"] for launch in launches}
