"""The promise "exact": every position of every golden model against transformers and llama.cpp."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from makeway.kernels import REFERENCE
from makeway.kernels.reference_attention import allowed_keys
from makeway.kv import Batch
from makeway.layers.ple import gather, ple
from makeway.models.base import run_layer, run_trunk
from tests.conftest import golden_arrays, golden_path
from tests.models.runner import CPU, Runner

LIMIT = 3e-4  # float32 engine against a float32 oracle, as the golden data suggest
BASE = ["qwen3moe-base", "qwen3next-base", "qwen35moe-base", "qwen4exp-base"]
QUANTISED = [
    ("qwen4exp-k96", "UD-Q4_K_XL"),
    ("qwen4exp-k256", "Q4_K_M"),
    *(("qwen3moe-k256", t) for t in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS")),
]


def load(name):
    reference = golden_arrays(f"{name}.npz")
    return Runner(golden_path(f"{name}-bf16.gguf")), reference, [int(t) for t in reference["tokens"]]


@pytest.mark.parametrize("name", BASE)
def test_logits_greedy_and_routes_equal_transformers(name):
    runner, reference, tokens = load(name)
    logits = runner.logits(tokens).numpy()
    assert np.abs(logits - reference["logits"]).max() <= LIMIT
    n = int(reference["n_prompt"])
    assert logits[n - 1 : -1].argmax(1).tolist() == reference["greedy"].tolist()
    for layer in range(runner.facts.n_layers):
        np.testing.assert_array_equal(runner.routed(layer), reference["experts"][:, layer])


@pytest.mark.parametrize("name", BASE)
def test_chunks_give_the_same_bits(name):
    runner, reference, tokens = load(name)
    whole = runner.logits(tokens)
    for chunk in (7, 64):
        assert torch.equal(runner.logits(tokens, chunk), whole), f"chunk {chunk}"
    sequence, n = runner.sequence(), int(reference["n_prompt"])
    rows = [runner.model.head(runner.residual(sequence, t)) for t in (tokens[:n], *([t] for t in tokens[n:]))]
    assert torch.equal(torch.cat(rows), whole), "a prompt, then single tokens"


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE)
def test_single_tokens_give_the_same_bits(name):
    runner, _, tokens = load(name)
    assert torch.equal(runner.logits(tokens, 1), runner.logits(tokens))


@pytest.mark.parametrize("name", BASE)
def test_incremental_equals_transformers(name):
    """Prompt in one chunk, then single steps of the oracle's own tokens."""
    runner, reference, tokens = load(name)
    n = int(reference["n_prompt"])
    sequence = runner.sequence()
    rows = [runner.model.head(runner.residual(sequence, tokens[:n]))]
    rows += [runner.model.head(runner.residual(sequence, [t])) for t in tokens[n:]]
    assert np.abs(torch.cat(rows).numpy() - reference["logits"]).max() <= LIMIT


@pytest.mark.parametrize("name", BASE)
def test_layer_outputs_equal_transformers(name):
    runner, reference, tokens = load(name)
    sequence = runner.sequence()
    sequence.reserve(len(tokens))
    batch = Batch.of([(sequence, tokens)], device=CPU)
    h = runner.model.embed(batch)
    for layer in range(runner.facts.n_layers):
        h = run_layer(runner.model, runner.experts, layer, h=h, batch=batch)
        at = h.reshape(len(tokens), -1)[torch.from_numpy(reference["layer_out_pos"]).long()]
        scale = max(1.0, float(np.abs(reference["layer_out"][layer]).max()))
        assert np.abs(at.numpy() - reference["layer_out"][layer]).max() <= LIMIT * scale, f"layer {layer}"


@pytest.mark.parametrize("steps", [(2, 7, 12), pytest.param((1, 3, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", BASE)
def test_interleaved_sequences_give_the_same_bits_as_alone(name, steps):
    runner, _, tokens = load(name)
    others = [tokens[::-1], tokens[3:] + tokens[:3]]
    alone = [runner.logits(t) for t in (tokens, *others)]
    sequences = [runner.sequence() for _ in range(3)]
    rows = [[], [], []]
    texts = [tokens, *others]
    done = [0, 0, 0]
    for turn in range(1000):
        parts = []
        for i, step in enumerate(steps):
            piece = texts[i][done[i] : done[i] + step + turn % 2]
            if piece:
                parts.append((i, piece))
        if not parts:
            break
        for i, piece in parts:
            sequences[i].reserve(len(piece))
        batch = Batch.of([(sequences[i], piece) for i, piece in parts], device=CPU)
        logits = runner.model.head(run_trunk(runner.model, runner.experts, batch))
        for (i, piece), s in zip(parts, batch.segments, strict=True):
            rows[i].append(logits[s.rows])
            done[i] += len(piece)
    for i in range(3):
        assert torch.equal(torch.cat(rows[i]), alone[i]), f"sequence {i}"


@pytest.mark.parametrize(("name", "quant"), QUANTISED)
def test_quantised_files_equal_llama_cpp_on_the_dequantised_weights(name, quant):
    reference = golden_arrays(f"{name}-quant.npz")
    runner = Runner(golden_path(f"{name}-{quant}.gguf"))
    tokens = [int(t) for t in reference["tokens"]]
    logits = runner.logits(tokens)
    assert np.abs(logits.numpy() - reference[f"{quant}/logits"]).max() <= LIMIT
    for layer in range(runner.facts.n_layers):
        np.testing.assert_array_equal(runner.routed(layer), reference[f"{quant}/experts"][:, layer])
    prompt = tokens[: int(reference["n_prompt"])]
    answer = []
    sequence = runner.sequence()
    h = runner.residual(sequence, prompt)
    for _ in range(32):
        answer.append(int(runner.model.head(h[-1:]).argmax()))
        h = runner.residual(sequence, answer[-1:])
    assert answer == reference[f"{quant}/greedy"].tolist()
    assert torch.equal(runner.logits(tokens, 7), logits), "chunks of 7"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quant"), QUANTISED)
def test_chunks_of_quantised_files_give_the_same_bits(name, quant):
    runner = Runner(golden_path(f"{name}-{quant}.gguf"))
    tokens = [int(t) for t in golden_arrays(f"{name}-quant.npz")["tokens"]]
    logits = runner.logits(tokens)
    for chunk in (1, 64):
        assert torch.equal(runner.logits(tokens, chunk), logits), f"chunk {chunk}"


def test_sparse_selection_equals_transformers():
    """Recorded through the ops table: which keys each query of each sparse layer may see."""
    reference = golden_arrays("qwen4exp-base.npz")
    seen = []

    def attend(q, kv, *, rows, selected=None, gate=None):
        assert selected is not None
        seen.append(allowed_keys(selected, rows.positions, n_keys=rows.max_keys, ratio=kv.indexer[2]))
        return REFERENCE.attend(q, kv, rows=rows, selected=selected, gate=gate)

    runner = Runner(golden_path("qwen4exp-base-bf16.gguf"), ops=replace(REFERENCE, attend=attend))
    tokens = [int(t) for t in reference["tokens"]]
    runner.logits(tokens)
    layers = sorted(k for k in runner.facts.kv_shapes if k < runner.facts.n_layers)
    assert len(seen) == len(layers)
    n = len(tokens)
    for layer, allowed in zip(layers, seen, strict=True):
        wanted = np.unpackbits(reference[f"qsa_selected_{layer}"], axis=1)[:, :n].astype(bool)
        np.testing.assert_array_equal(allowed.numpy(), wanted)
        assert wanted.sum(1).max() <= 35
        assert wanted.sum() < np.tril(np.ones((n, n))).sum() / 2, "the choice must be really sparse here"


def test_ple_rows_and_output_equal_transformers():
    runner, reference, tokens = load("qwen4exp-base")
    layer = int(reference["ple_layer"])
    weights, hashes = runner.model._ple[layer]
    np.testing.assert_array_equal(hashes.rows(tuple(tokens), ()), reference["ple_rows"])
    # The same rows when the text comes in pieces: EOS and the window cut inside the prompt.
    window, pieces = (), []
    for i in range(0, len(tokens), 5):
        piece = tuple(tokens[i : i + 5])
        pieces.append(hashes.rows(piece, window))
        window = hashes.next_window(piece, window)
    np.testing.assert_array_equal(np.concatenate(pieces), reference["ple_rows"])
    sequence = runner.sequence()
    sequence.reserve(len(tokens))
    batch = Batch.of([(sequence, tokens)], device=CPU)
    h = runner.model.embed(batch)
    for i in range(layer):
        h = run_layer(runner.model, runner.experts, i, h=h, batch=batch)
    out = ple(REFERENCE, weights, hashes, layer=layer, h=h, batch=batch, eps=runner.facts.eps)
    got = out.reshape(len(tokens), -1)[:48].numpy()
    assert np.abs(got - reference["ple_out"]).max() <= LIMIT
    # The same from rows that were fetched ahead of the pass.
    again = runner.sequence()
    again.reserve(len(tokens))
    batch = Batch.of([(again, tokens)], device=CPU)
    ahead = replace(batch, gathered={layer: gather(weights.table, hashes, layer=layer, batch=batch, device=CPU)})
    got = ple(REFERENCE, weights, hashes, layer=layer, h=h, batch=ahead, eps=runner.facts.eps)
    assert torch.equal(got, out)
    assert again.state.windows == sequence.state.windows


@pytest.mark.parametrize("name", ["qwen35moe-base", "qwen4exp-base"])
def test_mtp_block_equals_the_oracles(name):
    """Token t at position t with the trunk state of t-1 (zero at position 0), then three chained drafts."""
    runner, reference, tokens = load(name)
    n = int(reference["n_prompt"])
    trunk = runner.model.trunk_state(runner.residual(runner.sequence(), tokens))
    shifted = torch.cat((torch.zeros_like(trunk[:1]), trunk[:-1]))
    logits, _ = runner.draft(runner.sequence(), tokens, shifted)
    assert np.abs(logits[-48:].numpy() - reference["mtp_logits_zero_first_tail"]).max() <= LIMIT

    sequence = runner.sequence()
    runner.draft(sequence, tokens[:n], shifted[:n])
    token, state, drafts, rows = tokens[n], trunk[n - 1 : n], [], []
    for _ in range(3):
        logits, state = runner.draft(sequence, [token], state)
        token = int(logits.argmax())
        drafts.append(token)
        rows.append(logits[0].numpy())
    assert drafts == reference["mtp_draft_tokens"].tolist()
    assert np.abs(np.stack(rows) - reference["mtp_draft_logits"]).max() <= LIMIT
