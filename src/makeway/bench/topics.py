"""Topics: what makes consecutive tokens of a synthetic model route alike, and the token streams that use them.

Owns the rows of embedding and output, the vocabulary and streams of tokens; never knows a layer.
Hazard: token t belongs to topic t mod `n_topics`, and rows repeat every `row_period` tokens: whoever picks tokens by
another rule (every fourth one, say) picks topics without knowing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from makeway.gguf import GGMLType
from makeway.quants.encode import encode_rows

N_BYTES = 256
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_NORMAL, _CONTROL = 1, 3
_PERIOD = 8192


@dataclass(frozen=True)
class Knobs:
    """How a synthetic model routes.

    skew: router rows are scaled by rank^-skew, in an order of its own for each layer (0: all experts alike).
    locality: share of a token embedding's energy that is its topic's (0: no token tells anything about the next).
    n_topics: topics of the vocabulary. pull: how much likelier the output makes tokens of the same topic, so that
    sampled text stays in it (0: not at all). seed: of everything.
    """

    skew: float = 0.25
    locality: float = 0.5
    n_topics: int = 32
    pull: float = 16.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for values that mean nothing."""
        if not (0 <= self.locality <= 1 and self.skew >= 0 and self.n_topics >= 1 and self.pull >= 0):
            raise ValueError(f"{self}: needs 0 <= locality <= 1, skew >= 0, pull >= 0 and a topic at least")


def rng_of(seed: int, *keys: int) -> np.random.Generator:
    """Random numbers of their own for each use of a seed."""
    return np.random.Generator(np.random.SFC64([seed, *keys]))


def row_period(n_vocab: int, n_topics: int) -> int:
    """Rows of embedding and output repeat after so many tokens: a multiple of `n_topics`, at most `n_vocab`."""
    if n_topics > n_vocab:
        raise ValueError(f"{n_topics} topics are more than {n_vocab} tokens")
    return min(_PERIOD, n_vocab) // n_topics * n_topics or n_topics


def token_rows(ggml_type: GGMLType, n_vocab: int, *, hidden: int, knobs: Knobs, is_head: bool) -> NDArray[np.uint8]:
    """One period of rows, u8 [row_period, row bytes].

    Embedding: sqrt(locality) topic + sqrt(1 - locality) own, both normal, so values have standard deviation 1.
    Output: own / sqrt(hidden) + pull * topic / hidden: a residual that holds k of its topic's vector gives the topic's
    tokens k * pull more than others.
    """
    n, n_topics = row_period(n_vocab, knobs.n_topics), knobs.n_topics
    topics = rng_of(knobs.seed, 1).standard_normal((n_topics, hidden), dtype=np.float32)
    own = rng_of(knobs.seed, 2, int(is_head)).standard_normal((n, hidden), dtype=np.float32)
    topic = topics[np.arange(n) % n_topics]
    if is_head:
        rows = own * np.float32(hidden**-0.5) + topic * np.float32(knobs.pull / hidden)
    else:
        rows = own * np.float32((1 - knobs.locality) ** 0.5) + topic * np.float32(knobs.locality**0.5)
    return encode_rows(torch.from_numpy(rows), ggml_type).numpy()


def token_stream(n: int, *, n_vocab: int, knobs: Knobs, topic_tokens: int = 50, seed: int = 0) -> NDArray[np.int64]:
    """`n` tokens int64 that stay in a topic for `topic_tokens` on average, drawn uniformly from it; no special ones."""
    rng = rng_of(seed, 3)
    last = n_vocab - len(SPECIAL)
    hops = rng.random(n) < 1 / topic_tokens
    hops[:1] = True
    topics = rng.integers(knobs.n_topics, size=n)[np.maximum.accumulate(np.where(hops, np.arange(n), 0))]
    rounds = rng.integers(1 << 40, size=n) % -((topics - last) // knobs.n_topics)
    return np.asarray(topics + knobs.n_topics * rounds, dtype=np.int64)


def vocabulary(n_vocab: int, pre: str) -> dict[str, Any]:
    """`tokenizer.ggml.*` keys: all bytes, one merge, fillers that are plain text, special tokens at the end.

    Every program that reads byte-level BPE loads it, and any text can be encoded (byte by byte, nearly).
    """
    n_fill = n_vocab - N_BYTES - 1 - len(SPECIAL)
    if n_fill < 0:
        raise ValueError(f"a vocabulary of {n_vocab} is too small; use {N_BYTES + 1 + len(SPECIAL)} or more")
    tokens = [*_byte_letters(), "th", *(f"w{i}" for i in range(n_fill)), *SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([_NORMAL] * (n_vocab - 3) + [_CONTROL] * 3, np.int32),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": n_vocab - 1,
        "tokenizer.ggml.padding_token_id": n_vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (GPT-2's table), in its order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(N_BYTES) if b not in printable]
    return [chr(b) if b in printable else chr(N_BYTES + others.index(b)) for b in range(N_BYTES)]
