"""Stage 3: trains the byte-level BPE and encodes the corpus to `work/data/{train,held}.bin.xz` (uint16).

Owns `work/data/tokenizer.json`. Hazard: the pre-tokenizer's pattern must be the one that GGUF names `qwen2`.
"""

from __future__ import annotations

import json
import lzma
import random

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.demo_model.fetch import WORK

N_VOCAB = 8192
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|pad|>",
]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DATA = WORK / "data"


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return tokenizer


def main() -> None:
    docs = [json.loads(line) for line in (WORK / "corpus.jsonl").open()]
    random.Random(0).shuffle(docs)
    sample, size = [], 0
    for doc in docs:
        if not doc["held"] and size < 16_000_000:
            sample.append(doc["text"])
            size += len(doc["text"])
    tokenizer = train(sample)
    assert tokenizer.get_vocab_size() == N_VOCAB, tokenizer.get_vocab_size()
    DATA.mkdir(exist_ok=True)
    tokenizer.save(str(DATA / "tokenizer.json"))
    eos = tokenizer.token_to_id(SPECIAL[0])
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for i in range(0, len(docs), 256):
        batch = docs[i : i + 256]
        for doc, enc in zip(batch, tokenizer.encode_batch([d["text"] for d in batch]), strict=True):
            parts[doc["held"]].append(np.array([*enc.ids, eos], dtype=np.uint16))
    for held, name in ((False, "train"), (True, "held")):
        tokens = np.concatenate(parts[held])
        (DATA / f"{name}.bin.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=1))
        n_bytes = sum(len(d["text"].encode()) for d in docs if d["held"] == held)
        print(f"{name}: {len(tokens):,} tokens, {n_bytes:,} bytes ({n_bytes / len(tokens):.2f} bytes a token)")


if __name__ == "__main__":
    main()
