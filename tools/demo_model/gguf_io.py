"""Reads a qwen4exp GGUF into the training model's shape and tensors (through the gguf package)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from tools.demo_model.shape import Shape


def read_gguf(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Shape from the metadata, tensors dequantised to float32."""
    reader = GGUFReader(path)

    def get(key: str) -> Any:
        return reader.fields[f"qwen4exp.{key}"].contents()

    tensors = {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist()))).copy())
        for t in reader.tensors
    }
    tensors = {name: value.float() for name, value in tensors.items()}
    draft = get("nextn_predict_layers") if "qwen4exp.nextn_predict_layers" in reader.fields else 0
    ratios = get("attention.compress_ratios")
    shape = Shape(
        n_vocab=tensors["token_embd.weight"].shape[0],
        n_layers=get("block_count") - draft,
        hidden=get("embedding_length"),
        n_streams=get("hyper_connection.count"),
        low_rank=get("hyper_connection.low_rank"),
        n_heads=get("attention.head_count"),
        n_kv=get("attention.head_count_kv"),
        head_dim=get("attention.key_length"),
        n_rot=get("rope.dimension_count"),
        theta=get("rope.freq_base"),
        n_experts=get("expert_count"),
        top_k=get("expert_used_count"),
        expert_ff=get("expert_feed_forward_length"),
        shared_ff=get("expert_shared_feed_forward_length"),
        k_heads=get("ssm.group_count"),
        v_heads=get("ssm.time_step_rank"),
        delta_dim=get("ssm.state_size"),
        taps=get("ssm.conv_kernel"),
        interval=get("full_attention_interval"),
        index_heads=get("attention.indexer.head_count"),
        index_dim=get("attention.indexer.key_length"),
        budget=get("attention.indexer.top_k"),
        ratio=max(ratios),
        ple_layer=get("ple.layers")[0],
        ngram=get("ple.ngram_size"),
        heads_per_ngram=get("ple.heads_per_ngram"),
        row=get("embedding_length_per_layer_input"),
        ple_taps=get("ple.conv_kernel"),
        eos=get("ple.eos_token_id"),
        context=get("context_length"),
        multipliers=tuple(int(v) for v in get("ple.layer_multipliers")),
        head_offsets=tuple(int(v) for v in get("ple.head_offsets")),
        head_sizes=tuple(int(v) for v in get("ple.head_vocab_sizes")),
        table_rows=tensors["per_layer_token_embd.weight"].shape[0],
    )
    return shape, tensors
