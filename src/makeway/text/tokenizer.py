"""Byte-level BPE from a GGUF's vocabulary, on the `tokenizers` library.

Owns the mapping between text and token ids. Never guesses: a vocabulary it does not know is refused.
Hazard: the library's own decoder is not used, because a token may hold half a character; `token_bytes` is exact.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from makeway.errors import UserError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before BPE, by `tokenizer.ggml.pre`; qwen35 keeps combining marks with their letters.
PRE_TOKENIZERS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
}
# Token types of the GGUF format.
_CONTROL, _USER_DEFINED = 3, 4
# Tokens that end an answer wherever they are in a Qwen vocabulary, besides the file's own EOS.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Build with `from_metadata`. Attributes: n_tokens, eos_ids, bos_id, eos_id, chat_template."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[str],
        *,
        special: Iterable[int],
        user_defined: Iterable[int],
        pre: str,
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        """Raises UserError, naming `source`, when the vocabulary is inconsistent."""
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise UserError(f"{source}: 'tokenizer.ggml.pre' is '{pre}', which is not supported; makeway knows {known}")
        self.n_tokens = len(tokens)
        self.bos_id, self.eos_id, self.chat_template = bos_id, eos_id, chat_template
        self._tokens, self._add_bos = tokens, add_bos
        self._special = frozenset(special)
        self._whole = self._special | frozenset(user_defined)
        vocabulary = {token: i for i, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise UserError(f"{source}: 'tokenizer.ggml.tokens' holds a token twice; convert the model again")
        pairs = _merge_pairs(merges, vocabulary, source)
        try:
            library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=False))
        except Exception as error:
            raise UserError(f"{source}: 'tokenizer.ggml.merges' cannot be used: {error}") from error
        library.normalizer = normalizers.NFC()
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        library.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(self._special)])
        library.add_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(self._whole - self._special)])
        self._library = library
        ends = {vocabulary[t] for t in _END_TOKENS if t in vocabulary}
        self.eos_ids = frozenset(ends | ({eos_id} if eos_id is not None else set()))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, source: str) -> "Tokenizer":
        """The tokenizer of a GGUF file; raises UserError naming `source` and the key that is missing or wrong."""

        def need(key: str) -> Any:
            if key not in metadata:
                raise UserError(f"{source}: '{key}' is missing; the file has no vocabulary, convert the model again")
            return metadata[key]

        model = need("tokenizer.ggml.model")
        if model != "gpt2":
            raise UserError(f"{source}: 'tokenizer.ggml.model' is '{model}'; makeway reads byte-level BPE (gpt2)")
        tokens, merges = list(need("tokenizer.ggml.tokens")), list(need("tokenizer.ggml.merges"))
        types = [int(t) for t in need("tokenizer.ggml.token_type")]
        if len(types) != len(tokens):
            raise UserError(
                f"{source}: 'tokenizer.ggml.token_type' has {len(types)} entries for {len(tokens)} tokens; "
                "convert the model again"
            )
        ids: dict[str, int | None] = {}
        for name in ("bos", "eos"):
            key = f"tokenizer.ggml.{name}_token_id"
            value = metadata.get(key)
            if value is not None and not 0 <= int(value) < len(tokens):
                raise UserError(f"{source}: '{key}' is {value}, but there are {len(tokens)} tokens")
            ids[name] = None if value is None else int(value)
        return cls(
            tokens,
            merges,
            special=[i for i, t in enumerate(types) if t == _CONTROL],
            user_defined=[i for i, t in enumerate(types) if t == _USER_DEFINED],
            pre=str(need("tokenizer.ggml.pre")),
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
            chat_template=metadata.get("tokenizer.chat_template"),
            source=source,
        )

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a text. parse_special: control tokens written in the text become their ids; add_special: the
        BOS token where the model wants one. Raises UserError for text that is not Unicode (lone surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the text holds a lone surrogate at character {error.start}; it is no Unicode") from error
        self._library.encode_special_tokens = not parse_special
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if add_special and self._add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (half a character is possible); raises UserError for an id out of range."""
        if not 0 <= token < self.n_tokens:
            raise UserError(f"token id {token} is out of range; ids are 0 to {self.n_tokens - 1}")
        text = self._tokens[token]
        if token in self._whole:
            return text.encode("utf-8")
        # A character outside the byte alphabet (a filler token) stands for itself.
        return b"".join(bytes((_BYTE_OF[c],)) if c in _BYTE_OF else c.encode("utf-8") for c in text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        parts = (self.token_bytes(i) for i in ids if not (skip_special and i in self._special))
        return b"".join(parts).decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """True for control tokens, which are no text."""
        return token in self._special

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._tokens[token]

    @property
    def bos_token(self) -> str:
        return self._text_of(self.bos_id)

    @property
    def eos_token(self) -> str:
        return self._text_of(self.eos_id)


def _merge_pairs(merges: list[str], vocabulary: Mapping[str, int], source: str) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise UserError(
                f"{source}: 'tokenizer.ggml.merges' entry {i} ('{merge[:40]}') names no token; convert the model again"
            )
        pairs.append((left, right))
    return pairs
