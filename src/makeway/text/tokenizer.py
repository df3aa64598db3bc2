"""Byte-level BPE from a GGUF's vocabulary, on the `tokenizers` library.

Owns the mapping between text and token ids. Never guesses: a vocabulary it does not know is refused.
Hazard: the library's own decoder is not used, because a token may hold half a character; `token_bytes` is exact.
"""

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from makeway.errors import UserError
from makeway.text.vocabulary import BYTE_OF, Vocabulary, read_vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before BPE, by `tokenizer.ggml.pre`; qwen35 keeps combining marks with their letters.
PRE_TOKENIZERS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
}
# Qwen's published tokenizers compose text (NFC) first; GPT-2's does not.
_COMPOSED = frozenset(("qwen2", "qwen35"))


class Tokenizer:
    """Text <-> ids of one vocabulary; safe to use from several threads. Build it with `from_metadata`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises UserError, naming the file and the key, for an unknown `pre` or merges that cannot be used."""
        if vocabulary.pre not in PRE_TOKENIZERS:
            raise UserError(
                f"{vocabulary.source}: 'tokenizer.ggml.pre' is '{vocabulary.pre}', which is not supported; "
                f"makeway knows {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        self._vocabulary = vocabulary
        self._whole = vocabulary.special | vocabulary.user_defined
        try:
            model = models.BPE(vocab=dict(vocabulary.ids), merges=vocabulary.merges, ignore_merges=False)
        except Exception as error:
            raise UserError(f"{vocabulary.source}: 'tokenizer.ggml.merges' cannot be used: {error}") from error
        # Two pipelines over one model: whether control tokens are parsed is then no state that threads share.
        self._parsing = self._pipeline(model, vocabulary.special)
        self._plain = self._pipeline(model, frozenset())

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, source: str) -> "Tokenizer":
        """The tokenizer of a GGUF file; raises UserError naming `source` and the key that is missing or wrong."""
        return cls(read_vocabulary(metadata, source=source))

    def _pipeline(self, model: models.BPE, special: frozenset[int]) -> tokenizers.Tokenizer:
        vocabulary = self._vocabulary
        pipeline = tokenizers.Tokenizer(model)
        if vocabulary.pre in _COMPOSED:
            pipeline.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[vocabulary.pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pipeline.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
        pipeline.add_special_tokens(self._added(special))
        pipeline.add_tokens(self._added(vocabulary.user_defined))
        return pipeline

    def _added(self, ids: frozenset[int]) -> list[str | AddedToken]:
        return [AddedToken(text, normalized=False) for i in sorted(ids) if (text := self._vocabulary.tokens[i])]

    @property
    def n_tokens(self) -> int:
        """Number of ids; valid ids are 0 .. n_tokens - 1."""
        return len(self._vocabulary.tokens)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: EOS, end of turn, end of text and their like."""
        return self._vocabulary.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def padding_id(self) -> int | None:
        return self._vocabulary.padding_id

    @property
    def bos_token(self) -> str:
        """Text of the BOS token, "" without one; what chat templates get."""
        return self._text_of(self.bos_id)

    @property
    def eos_token(self) -> str:
        """Text of the EOS token, "" without one; what chat templates get."""
        return self._text_of(self.eos_id)

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Sources by name; the file's `tokenizer.chat_template` is 'default'."""
        return self._vocabulary.chat_templates

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        parse_special: control tokens written in the text become their ids (user-defined tokens always do);
        add_special: BOS and EOS where the model wants them. Raises UserError for text that is not Unicode (lone
        surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise UserError(
                f"the text holds a lone surrogate at character {error.start} (U+{code:04X}), which is no Unicode"
            ) from error
        pipeline = self._parsing if parse_special else self._plain
        ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
        if add_special and self._vocabulary.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and self._vocabulary.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. Raises UserError for an id out of range."""
        checked = map(self._checked, ids)
        parts = (self._bytes(i) for i in checked if not (skip_special and i in self._vocabulary.special))
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (half a character is possible; none for an unused filler).

        Raises UserError for an id out of range.
        """
        return self._bytes(self._checked(token))

    def is_special(self, token: int) -> bool:
        """True for control tokens, which are no text. Raises UserError for an id out of range."""
        return self._checked(token) in self._vocabulary.special

    def _bytes(self, token: int) -> bytes:
        text = self._vocabulary.tokens[token]
        if token in self._vocabulary.unused:
            return b""
        if token in self._whole:
            return text.encode("utf-8")
        try:
            return bytes([BYTE_OF[c] for c in text])
        except KeyError:  # not written in the byte alphabet: it stands for itself
            return text.encode("utf-8")

    def _checked(self, token: int) -> int:
        try:
            number = index(token)
        except TypeError:
            raise UserError(f"a token id is {token!r}, which is no integer") from None
        if not 0 <= number < self.n_tokens:
            raise UserError(f"token id {number} is out of range; ids are 0 to {self.n_tokens - 1}")
        return number

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._vocabulary.tokens[token]
