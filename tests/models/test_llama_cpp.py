"""llama.cpp itself, in a process of its own, on the same weights: log-probabilities of the next token.

Each golden file is rewritten in float32 (llama.cpp rounds activations to the type of 16- and 8-bit matrices), and the
KV cache is float32 without flash attention: what is left is rounding, so the limit can be tight.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from makeway.gguf import open_gguf
from makeway.quants import decode_rows
from makeway.text import Tokenizer
from tests.conftest import golden_arrays, golden_path
from tests.models.runner import Runner

LIMIT = 3e-4
N_TOKENS, N_PROMPTS = 100, 8
ORACLE = """
import json, sys, xllamacpp as x
path, prompts, n_vocab = json.load(sys.stdin)
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.fit_params, p.verbosity = path, 512, 1, False, False, -1
p.cpuparams.n_threads = 1
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = x.Server(p)
rows = []
for prompt in prompts:
    request = {"prompt": prompt, "n_predict": 1, "n_probs": n_vocab, "temperature": 0.0, "cache_prompt": False}
    content = server.handle_completions(request)["choices"][0]["logprobs"]["content"][0]
    rows.append({t["id"]: t["logprob"] for t in content["top_logprobs"]})
print("RESULT" + json.dumps(rows), flush=True)
"""


def write_f32(source, target):
    """The same model with every tensor in float32, through the `gguf` package's writer."""
    import gguf

    with open_gguf(source) as file:
        writer = gguf.GGUFWriter(target, file.get_str("general.architecture"))
        reader = gguf.GGUFReader(source)
        for field in reader.fields.values():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
        for name, info in file.tensors.items():
            raw = torch.from_numpy(file.bytes_of(name).copy()).view(int(np.prod(info.shape[:-1])), -1)
            writer.add_tensor(name, decode_rows(raw, info.type).view(info.shape).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen3moe-base", "qwen3moe-base-bf16.gguf"),
        ("qwen3next-base", "qwen3next-base-bf16.gguf"),
        ("qwen35moe-base", "qwen35moe-base-bf16.gguf"),
        ("qwen4exp-k96", "qwen4exp-k96-UD-Q4_K_XL.gguf"),
        ("qwen4exp-base", "qwen4exp-base-bf16.gguf"),
    ],
)
def test_next_token_equals_llama_cpp(name, file, tmp_path):
    path = tmp_path / "f32.gguf"
    write_f32(golden_path(file), path)
    runner = Runner(path)
    tokens = [int(t) for t in golden_arrays(f"{name}.npz")["tokens"]][:N_TOKENS]
    ours = torch.log_softmax(runner.logits(tokens).double(), dim=-1)
    # llama.cpp's server reports no probabilities where it chose an end token or half a character.
    text = Tokenizer.from_metadata(runner.file.metadata, source=name)
    best = ours.argmax(-1).tolist()
    whole = [n for n, t in enumerate(best, start=1) if text.decode([t]).isascii() and t not in text.eos_ids]
    prompts = [tokens[:n] for n in whole[:: max(1, len(whole) // N_PROMPTS)]]
    assert len(prompts) >= N_PROMPTS
    assert len(prompts[-1]) > N_TOKENS * 3 // 4
    request = json.dumps([str(path), prompts, runner.facts.n_vocab])
    done = subprocess.run([sys.executable, "-c", ORACLE], input=request, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-2000:]
    for prompt, row in zip(prompts, json.loads(lines[0].removeprefix("RESULT")), strict=True):
        assert len(row) == runner.facts.n_vocab
        theirs = np.array([row[str(i)] for i in range(runner.facts.n_vocab)])
        assert np.abs(ours[len(prompt) - 1].numpy() - theirs).max() <= LIMIT, f"{len(prompt)} tokens"
