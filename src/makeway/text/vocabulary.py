"""The vocabulary in a GGUF's metadata, read and checked: tokens, merges, types, special ids, chat templates.

Owns which keys are read and what makes them unusable; never turns text into ids.
Hazard: a type taken wrongly is silent: a control token read as normal would be typed by any user, or never end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from makeway.errors import UserError

_KEY = "tokenizer.ggml."
_AGAIN = "convert the model again"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF format numbers it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end an answer by their text, where their type says that they are no ordinary text. Without that
# condition "</s>", an ordinary token of Qwen's vocabularies (HTML), would end answers.
_END_TEXTS = frozenset(
    (
        *(
            "<|im_end|>",
            "<|endoftext|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|end|>",
            "<|end_of_text|>",
            "<end_of_turn>",
            "<end_of_utterance>",
        ),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "</s>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<|file_sep|>"),
    )
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NOT_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about its tokens. `special` tokens are no text; `user_defined` ones are text kept whole."""

    source: str
    pre: str
    tokens: list[str]
    merges: list[tuple[str, str]]
    ids: Mapping[str, int]
    special: frozenset[int]
    user_defined: frozenset[int]
    unused: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    padding_id: int | None
    add_bos: bool
    add_eos: bool
    chat_templates: Mapping[str, str]


def read_vocabulary(metadata: Mapping[str, Any], *, source: str) -> Vocabulary:
    """Reads and checks the `tokenizer.*` keys. Raises UserError naming `source` and the key."""
    model = _need(metadata, "model", source)
    if model != "gpt2":
        raise _fault(source, "model", f"is {_short(model)}; makeway reads byte-level BPE, which is called 'gpt2'")
    tokens = _texts(metadata, "tokens", source)
    types = _types(metadata, len(tokens), source)
    of_type = {t: frozenset(np.flatnonzero(types == t).tolist()) for t in TokenType}
    special = of_type[TokenType.CONTROL] | of_type[TokenType.UNKNOWN]
    unused = of_type[TokenType.UNUSED]
    ids = _index(tokens, unused, source)
    eos_id = _token_id(metadata, "eos", len(tokens), source)
    add_bos, add_eos = _flag(metadata, "add_bos_token", source), _flag(metadata, "add_eos_token", source)
    bos_id = _token_id(metadata, "bos", len(tokens), source)
    for name, wanted, token in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
        if wanted and token is None:
            raise _fault(source, f"{name}_token_id", f"is missing although add_{name}_token is true; {_AGAIN}")
    ends = {_token_id(metadata, name, len(tokens), source) for name in _END_KEYS} - {None}
    ends |= {i for text in _END_TEXTS if (i := ids.get(text)) in special | of_type[TokenType.USER_DEFINED]}
    if not ends:
        raise _fault(source, "eos_token_id", f"is missing, and no token is known to end an answer; {_AGAIN}")
    return Vocabulary(
        source=source,
        pre=str(_need(metadata, "pre", source)),
        tokens=tokens,
        merges=_merges(metadata, ids, source),
        ids=ids,
        special=special,
        user_defined=of_type[TokenType.USER_DEFINED],
        unused=unused,
        eos_ids=frozenset(i for i in ends if i is not None),
        bos_id=bos_id,
        eos_id=eos_id,
        padding_id=_token_id(metadata, "padding", len(tokens), source),
        add_bos=add_bos,
        add_eos=add_eos,
        chat_templates=_chat_templates(metadata, source),
    )


def _fault(source: str, key: str, what: str) -> UserError:
    return UserError(f"{source}: '{key if key.startswith('tokenizer.') else _KEY + key}' {what}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _need(metadata: Mapping[str, Any], key: str, source: str) -> Any:
    if (value := metadata.get(_KEY + key)) is None:
        raise _fault(source, key, f"is missing: the file has no complete vocabulary; {_AGAIN}")
    return value


def _texts(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = _need(metadata, key, source)
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise _fault(source, key, f"is not an array of strings; {_AGAIN}")
    return value


def _types(metadata: Mapping[str, Any], n_tokens: int, source: str) -> np.ndarray[Any, Any]:
    types = np.asarray(_need(metadata, "token_type", source))  # [n_tokens]
    if types.ndim != 1 or (types.size and types.dtype.kind not in "iu"):
        raise _fault(source, "token_type", f"is not an array of integers; {_AGAIN}")
    if types.size != n_tokens:
        raise _fault(source, "token_type", f"has {types.size} entries for {n_tokens} tokens; {_AGAIN}")
    if unknown := sorted(set(np.unique(types).tolist()) - set(TokenType)):
        raise _fault(source, "token_type", f"holds {unknown[0]}, which is no token type (0 to 6); {_AGAIN}")
    return types


def _index(tokens: list[str], unused: frozenset[int], source: str) -> dict[str, int]:
    """Text -> id. Unused fillers may repeat each other; a token that text can become may not be there twice."""
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        ids = {}
        for i, token in enumerate(tokens):
            if (first := ids.setdefault(token, i)) != i and i not in unused:
                raise _fault(source, "tokens", f"holds {_short(token)} twice (ids {first} and {i}); {_AGAIN}")
    for character, byte in BYTE_OF.items():
        if character not in ids and byte not in _NOT_IN_UTF8:
            raise _fault(source, "tokens", f"has no token for byte 0x{byte:02x}, so some text has no ids; {_AGAIN}")
    return ids


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int], source: str) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(_texts(metadata, "merges", source)):
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise _fault(source, "merges", f"entry {i} ({_short(merge)}) names no token; {_AGAIN}")
        pairs.append((left, right))
    return pairs


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int, source: str) -> int | None:
    key = f"{name}_token_id"
    value = metadata.get(_KEY + key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < n_tokens:
        raise _fault(source, key, f"is {_short(value)}, which is no token id (0 to {n_tokens - 1}); {_AGAIN}")
    return int(value)


def _flag(metadata: Mapping[str, Any], key: str, source: str) -> bool:
    value = metadata.get(_KEY + key, False)
    if not isinstance(value, bool | np.bool_):
        raise _fault(source, key, f"is {_short(value)}, not true or false; {_AGAIN}")
    return bool(value)


def _chat_templates(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    """Templates by name; the one without a name is 'default'."""
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in metadata.items():
        name = "default" if key == prefix else key.removeprefix(prefix + ".")
        if name == key:
            continue
        if not isinstance(value, str):
            raise _fault(source, key, f"is {_short(value)}, not a text; {_AGAIN}")
        found[name] = value
    return found
