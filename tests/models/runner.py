"""Runs a model by hand, without an engine, and records what the oracles recorded."""

import numpy as np
import torch

from makeway.experts.executors import DirectExperts
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE
from makeway.kv import Batch, KVCache, SequenceState, StatePool, StateShapes
from makeway.models import load_model
from makeway.models.base import run_layer, run_trunk

CPU = torch.device("cpu")


class RecordingExperts(DirectExperts):
    """Direct experts that keep the routed ids by layer."""

    def __init__(self, store, ops):
        super().__init__(store, ops)
        self.ids = {}

    def __call__(self, layer, moe):
        self.ids.setdefault(layer, []).append(moe.ids.numpy().copy())
        super().__call__(layer, moe)


class Runner:
    """One open model, its cache, and sequences on it."""

    def __init__(self, path, n_blocks=32, ops=REFERENCE):
        self.file = open_gguf(path)
        self.model = load_model(self.file, ops, device=CPU)
        self.facts = self.model.facts
        self.cache = KVCache(self.facts.kv_shapes, n_blocks, device=CPU)
        shapes = StateShapes.of(self.facts.state_shapes, kv=self.facts.kv_shapes, ple=self.facts.ple_tails)
        self.states = StatePool(shapes, 8, device=CPU, n_kept=8)
        self.experts = RecordingExperts(self.model.store, ops)

    def sequence(self):
        return SequenceState(self.cache, self.states)

    def residual(self, sequence, tokens, **options):
        sequence.reserve(len(tokens))
        return run_trunk(self.model, self.experts, Batch.of([(sequence, list(tokens))], device=CPU, **options))

    def logits(self, tokens, chunk=None):
        """Logits [n, vocab] of a fresh sequence read in chunks."""
        sequence = self.sequence()
        chunk = chunk or len(tokens)
        pieces = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        out = [self.model.head(self.residual(sequence, piece)) for piece in pieces]
        sequence.close()
        return torch.cat(out)

    def routed(self, layer):
        return np.concatenate(self.experts.ids[layer])

    def draft(self, sequence, tokens, state):
        """The MTP block over tokens at the sequence's positions; returns (logits, next state)."""
        layer = self.facts.n_layers
        sequence.reserve(len(tokens))
        batch = Batch.of([(sequence, list(tokens))], device=CPU)
        h = self.model.draft_input(batch, state)
        h = run_layer(self.model, self.experts, layer, h=h, batch=batch)
        sequence.advance(len(tokens))
        return self.model.draft_head(h), self.model.draft_state(h)
