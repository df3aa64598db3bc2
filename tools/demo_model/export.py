"""Stage 5: checkpoint -> GGUF, as llama.cpp's converter writes qwen4exp, in real quantisation types.

`python -m tools.demo_model.export --run DIR --out FILE [--f16]`. Owns the choice of types.
Hazard: attention.compress_ratios must name the ratio for every full-attention layer, the MTP block included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType, GGUFWriter
from tokenizers import Tokenizer

from tools.demo_model.quantise import quantise
from tools.demo_model.shape import Shape, with_hashes
from tools.demo_model.tokens import DATA, SPECIAL

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def type_of(name: str, shape: tuple[int, ...], *, f16: bool) -> T:
    """The type of one tensor."""
    if len(shape) == 1 or "ssm_conv1d" in name or "ffn_gate_inp" in name:
        return T.F32
    if "indexer" in name:
        return T.BF16
    if f16 or "ple_conv1d" in name:
        return T.F16
    if "ffn_gate_exps" in name or "ffn_up_exps" in name:
        return T.Q4_K
    if "ffn_down_exps" in name or "per_layer_token_embd" in name:
        return T.Q5_1
    wide = any(part in name for part in ("attn_", "ssm_out", "token_embd", "output.weight", "ple_"))
    if wide and "hc_" not in name and shape[-1] % 256 == 0:
        return T.Q6_K
    return T.Q8_0


def packed(value: np.ndarray, kind: T) -> np.ndarray:
    """The tensor's array for the writer."""
    if kind == T.F32:
        return value.astype(np.float32)
    if kind == T.F16:
        return value.astype(np.float16)
    if kind == T.BF16:  # exact: the values were rounded to bfloat16 at the end of training
        return (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return quantise(value, kind)


def add_metadata(w: GGUFWriter, s: Shape, name: str) -> None:
    a = "qwen4exp."
    w.add_type("model")
    w.add_name(name)
    w.add_size_label(f"{s.n_experts}x0.6M")
    w.add_license("apache-2.0")
    n_blocks = s.n_layers + 1
    integers = {
        "block_count": n_blocks, "context_length": s.context, "embedding_length": s.hidden,
        "attention.head_count": s.n_heads, "attention.head_count_kv": s.n_kv,
        "expert_count": s.n_experts, "expert_used_count": s.top_k,
        "attention.key_length": s.head_dim, "attention.value_length": s.head_dim,
        "expert_feed_forward_length": s.expert_ff, "expert_shared_feed_forward_length": s.shared_ff,
        "nextn_predict_layers": 1, "ssm.conv_kernel": s.taps, "ssm.state_size": s.delta_dim,
        "ssm.group_count": s.k_heads, "ssm.time_step_rank": s.v_heads, "ssm.inner_size": s.v_heads * s.delta_dim,
        "full_attention_interval": s.interval, "rope.dimension_count": s.n_rot,
        "hyper_connection.count": s.n_streams, "hyper_connection.low_rank": s.low_rank,
        "attention.indexer.head_count": s.index_heads, "attention.indexer.key_length": s.index_dim,
        "attention.indexer.top_k": s.budget, "ple.ngram_size": s.ngram, "ple.heads_per_ngram": s.heads_per_ngram,
        "ple.conv_kernel": s.ple_taps, "ple.eos_token_id": s.eos, "embedding_length_per_layer_input": s.row,
    }  # fmt: skip
    for key, value in integers.items():
        w.add_uint32(a + key, value)
    w.add_float32(a + "rope.freq_base", s.theta)
    w.add_float32(a + "attention.layer_norm_rms_epsilon", s.eps)
    arrays = {
        "rope.dimension_sections": (GGUFValueType.INT32, [3, 3, 2, 0]),
        "attention.recurrent_layers": (GGUFValueType.BOOL, [s.is_delta(i) for i in range(n_blocks)]),
        "attention.compress_ratios": (GGUFValueType.INT32, [0 if s.is_delta(i) else s.ratio for i in range(n_blocks)]),
        "ple.layers": (GGUFValueType.INT32, [s.ple_layer]),
        "ple.layer_multipliers": (GGUFValueType.UINT64, list(s.multipliers)),
        "ple.head_offsets": (GGUFValueType.UINT64, list(s.head_offsets)),
        "ple.head_vocab_sizes": (GGUFValueType.UINT64, list(s.head_sizes)),
    }
    for key, (kind, values) in arrays.items():
        w.add_key_value(a + key, values, GGUFValueType.ARRAY, sub_type=kind)


def add_tokenizer(w: GGUFWriter, tokenizer: Tokenizer) -> None:
    import json

    model = json.loads(tokenizer.to_str())["model"]
    n = tokenizer.get_vocab_size()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([tokenizer.id_to_token(i) for i in range(n)])
    w.add_token_types([3 if tokenizer.id_to_token(i) in SPECIAL else 1 for i in range(n)])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    w.add_eos_token_id(tokenizer.token_to_id("<|endoftext|>"))
    w.add_pad_token_id(tokenizer.token_to_id("<|pad|>"))
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)


def write(out: Path, s: Shape, tensors: dict[str, np.ndarray], *, f16: bool = False) -> None:
    w = GGUFWriter(out, "qwen4exp")
    add_metadata(w, s, "makeway demo")
    w.add_file_type(1 if f16 else 15)
    w.add_quantization_version(2)
    add_tokenizer(w, Tokenizer.from_file(str(DATA / "tokenizer.json")))
    for name, value in tensors.items():
        kind = type_of(name, value.shape, f16=f16)
        w.add_tensor(name, packed(value, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    from tools.demo_model.train import load

    a = argparse.ArgumentParser()
    a.add_argument("--run", type=Path, required=True)
    a.add_argument("--out", type=Path, required=True)
    a.add_argument("--f16", action="store_true")
    o = a.parse_args()
    tensors = {name: value.numpy() for name, value in load(o.run).items()}
    write(o.out, with_hashes(Shape()), tensors, f16=o.f16)


if __name__ == "__main__":
    main()
