"""The full Flash-Next model as a header with a hole behind it: real shapes and types, no disk space.

Dense types are those of UD-Q4_K_XL as far as they are known (gate/up Q4_K, down Q5_1, PLE table Q4_0 for its 4.5 bits).
"""

from pathlib import Path

from makeway.gguf import GGMLType
from tests.gguf_writer import write_gguf

T = GGMLType
HIDDEN, FF, EXPERTS, VOCAB, STREAMS, RANK = 2560, 640, 512, 248_320, 4, 320
LAYERS = 48


def write_flash_next(path: Path) -> Path:
    """Writes the sparse file; 49 blocks, 512 experts each, PLE at block 1."""
    tensors = {
        "token_embd.weight": (T.Q6_K, (VOCAB, HIDDEN), None),
        "output.weight": (T.Q6_K, (VOCAB, HIDDEN), None),
        "per_layer_token_embd.weight": (T.Q4_0, (320_001_536, 160), None),
    }
    tensors |= _mixer("output_hc_", inject=False)
    for i in range(LAYERS + 1):
        tensors |= _block(i, full=i == LAYERS or i % 4 == 3)
    width = STREAMS * HIDDEN
    for name, shape in (("key", (width, HIDDEN)), ("value", (HIDDEN, HIDDEN))):
        tensors[f"blk.1.ple_{name}.weight"] = (T.Q6_K, shape, None)
    for name in ("norm_key", "norm_query", "norm_conv"):
        tensors[f"blk.1.ple_{name}.weight"] = (T.F32, (width,), None)
    tensors["blk.1.ple_conv1d.weight"] = (T.F16, (width, 4), None)
    p = f"blk.{LAYERS}.nextn."
    tensors[p + "eh_proj.weight"] = (T.Q6_K, (HIDDEN, 2 * HIDDEN), None)
    tensors[p + "enorm.weight"] = (T.F32, (HIDDEN,), None)
    tensors[p + "hnorm.weight"] = (T.F32, (width,), None)
    tensors |= _mixer(p + "hc_head_", inject=False)
    write_gguf(path, _metadata(), tensors, sparse=True)
    return path


def _mixer(prefix, *, inject):
    width = STREAMS * HIDDEN
    out = {
        prefix + "norm.weight": (T.F32, (width,), None),
        prefix + "down.weight": (T.Q8_0, (RANK, width), None),
        prefix + "up.weight": (T.Q8_0, (width, RANK), None),
    }
    return out | ({prefix + "inject.weight": (T.Q8_0, (STREAMS, width), None)} if inject else {})


def _block(i, *, full):
    p = f"blk.{i}."
    shapes = {
        "ffn_gate_exps.weight": (T.Q4_K, (EXPERTS, FF, HIDDEN)),
        "ffn_up_exps.weight": (T.Q4_K, (EXPERTS, FF, HIDDEN)),
        "ffn_down_exps.weight": (T.Q5_1, (EXPERTS, HIDDEN, FF)),
        "ffn_gate_inp.weight": (T.F32, (EXPERTS, HIDDEN)),
        "ffn_gate_shexp.weight": (T.Q6_K, (FF, HIDDEN)),
        "ffn_up_shexp.weight": (T.Q6_K, (FF, HIDDEN)),
        "ffn_down_shexp.weight": (T.Q8_0, (HIDDEN, FF)),
        "ffn_gate_inp_shexp.weight": (T.F32, (1, HIDDEN)),
    }
    if full:
        shapes |= {
            "attn_q.weight": (T.Q6_K, (2 * 24 * 256, HIDDEN)),
            "attn_k.weight": (T.Q6_K, (512, HIDDEN)),
            "attn_v.weight": (T.Q6_K, (512, HIDDEN)),
            "attn_output.weight": (T.Q6_K, (HIDDEN, 24 * 256)),
            "attn_q_norm.weight": (T.F32, (256,)),
            "attn_k_norm.weight": (T.F32, (256,)),
            "indexer.q_proj.weight": (T.BF16, (512, HIDDEN)),
            "indexer.k_proj.weight": (T.BF16, (128, HIDDEN)),
            "indexer.q_norm.weight": (T.F32, (128,)),
            "indexer.k_norm.weight": (T.F32, (128,)),
        }
    else:
        shapes |= {
            "attn_qkv.weight": (T.Q6_K, (10_240, HIDDEN)),
            "attn_gate.weight": (T.Q6_K, (6144, HIDDEN)),
            "ssm_out.weight": (T.Q6_K, (HIDDEN, 6144)),
            "ssm_conv1d.weight": (T.F32, (10_240, 4)),
            "ssm_a": (T.F32, (48,)),
            "ssm_dt.bias": (T.F32, (48,)),
            "ssm_norm.weight": (T.F32, (128,)),
            "ssm_alpha.weight": (T.Q8_0, (48, HIDDEN)),
            "ssm_beta.weight": (T.Q8_0, (48, HIDDEN)),
        }
    out = {p + name: (kind, shape, None) for name, (kind, shape) in shapes.items()}
    return out | _mixer(p + "hc_attn_", inject=True) | _mixer(p + "hc_ffn_", inject=True)


def _metadata():
    a = "qwen4exp."
    sizes = [20_000_096] * 16
    return {
        "general.architecture": "qwen4exp",
        "general.name": "Flash-Next shape",
        a + "block_count": LAYERS + 1,
        a + "nextn_predict_layers": 1,
        a + "context_length": 262_144,
        a + "embedding_length": HIDDEN,
        a + "attention.head_count": 24,
        a + "attention.head_count_kv": 2,
        a + "attention.key_length": 256,
        a + "attention.value_length": 256,
        a + "attention.layer_norm_rms_epsilon": 1e-6,
        a + "rope.freq_base": 1e7,
        a + "rope.dimension_count": 64,
        a + "expert_count": EXPERTS,
        a + "expert_used_count": 10,
        a + "expert_feed_forward_length": FF,
        a + "expert_shared_feed_forward_length": FF,
        a + "ssm.conv_kernel": 4,
        a + "ssm.state_size": 128,
        a + "ssm.group_count": 16,
        a + "ssm.time_step_rank": 48,
        a + "ssm.inner_size": 6144,
        a + "full_attention_interval": 4,
        a + "hyper_connection.count": STREAMS,
        a + "hyper_connection.low_rank": RANK,
        a + "attention.indexer.head_count": 4,
        a + "attention.indexer.key_length": 128,
        a + "attention.indexer.top_k": 2048,
        a + "attention.compress_ratios": [4 if i % 4 == 3 or i == LAYERS else 0 for i in range(LAYERS + 1)],
        a + "embedding_length_per_layer_input": 160,
        a + "ple.layers": [1],
        a + "ple.ngram_size": 3,
        a + "ple.heads_per_ngram": 8,
        a + "ple.conv_kernel": 4,
        a + "ple.eos_token_id": 248_046,
        a + "ple.layer_multipliers": [2**40 + 1, 2**40 + 3, 2**40 + 5],
        a + "ple.head_offsets": [i * 20_000_096 for i in range(16)],
        a + "ple.head_vocab_sizes": sizes,
    }
