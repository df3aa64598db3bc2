"""Grammars that an answer must follow: which tokens may come next, by `llguidance`.

Owns the way from a grammar's text to a mask per token. Never lets a grammar through that it understands in part only.
Hazard: a state belongs to one request and one thread; `CompiledGrammar` may be shared.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from makeway.errors import EngineFailed, UserError
from makeway.text.gbnf import gbnf_to_lark
from makeway.text.grammar_faults import check_bytes, check_rules, check_schema_size, reason_of, schema_path
from makeway.text.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "json_object", "regex", "gbnf", "lark"]
Reasoning = Literal["none", "open", "optional"]

# Space between JSON's parts, if any: a blank, or a new line and its indentation. Unbounded, weak models get lost in it.
JSON_SPACE = r"( |\n{1,2}[ \t]{0,40})"
_JSON_OPTIONS: Any = {"whitespace_pattern": JSON_SPACE, "lenient": False}
_THOUGHT = {
    "open": "start: thought gap @answer\n",
    "optional": "start: (opening thought gap)? @answer\nopening: /\\s{0,8}<think>/\n",
}
_THOUGHT_END = "thought[lazy]: /(?s:.*)<\\/think>/\ngap: /[ \\t\\r\\n]{0,8}/\n"


def with_json_options(schema: Any) -> Any:
    """A schema with our way of reading schemas written into it, whatever the client's `x-guidance` says of that."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(options if isinstance(options, dict) else {}), **_JSON_OPTIONS}}


class GrammarVocabulary:
    """A tokenizer's tokens as a tree that masks are computed from; build it once (0.6 s for 150k tokens) and share it.

    `n_vocab`: length of the masks, the width of the model's logits; ids from `n_tokens` on are padding.
    """

    def __init__(self, tokenizer: Tokenizer, *, n_vocab: int | None = None) -> None:
        """Raises UserError when the model has fewer logits than the tokenizer has tokens."""
        self.n_tokens = tokenizer.n_tokens
        self.n_vocab = self.n_tokens if n_vocab is None else n_vocab
        if self.n_vocab < self.n_tokens:
            raise UserError(f"the model has {self.n_vocab} logits for {self.n_tokens} tokens; convert the model again")
        self.ends = sorted(tokenizer.eos_ids)
        self.tree = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer)), eos_token=self.ends)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.n_tokens)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i) or i in tokenizer.eos_ids]
        self._byte_ids = {token: i for i, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Ids whose bytes are exactly `text`. The tokenizer may compose characters (NFC): then one id a byte."""
        ids = self._tokenizer.encode(text.decode("utf-8"), parse_special=False, add_special=False)
        if b"".join(self.tokens[i] for i in ids) == text:
            return ids
        return [self._byte_ids[text[i : i + 1]] for i in range(len(text))]


@dataclass(frozen=True)
class Grammar:
    """A grammar as it was given. `source`: the schema as JSON text, a regular expression (Rust's syntax; it must match
    the whole answer), GBNF, or Lark in llguidance's dialect; "" for "json_object".

    reasoning: what may come before the answer: "open" when the prompt ends inside `<think>`, so that everything is
    allowed up to `</think>`; "optional" when the model may open `<think>` itself.
    Lark's tokens match as much as they can: `start: WORD "a"` never ends where WORD is /[a-z]+/. So do the rules of a
    recursive GBNF grammar that are not recursive themselves.
    """

    kind: GrammarKind
    source: str = ""
    reasoning: Reasoning = "none"
    is_generated: bool = False  # by makeway, from parts that were checked: it may be of any size

    def compile(self, vocabulary: GrammarVocabulary) -> "CompiledGrammar":
        """May take seconds; needs no lock. Raises UserError that says where the grammar is wrong or not supported."""
        matcher = LLMatcher(vocabulary.tree, self._definition(), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some faults show only here
        if matcher.is_error():
            raise self._fault(matcher.get_error())
        return CompiledGrammar(self, vocabulary, matcher=matcher)

    def check(self) -> None:
        """Whether the grammar compiles, without a vocabulary. Raises UserError as `compile` does."""
        if report := LLMatcher.validate_grammar(self._definition()):
            raise self._fault(report)

    @property
    def _name(self) -> str:
        names = {"json_schema": "JSON schema", "regex": "regular expression", "gbnf": "GBNF grammar"}
        return names.get(self.kind, f"{self.kind} grammar")

    def _definition(self) -> str:
        """The grammar in llguidance's own JSON form."""
        if not self.is_generated:
            check_bytes(self.source, name=self._name)
        grammars = [{"name": "answer", **self._answer()}]
        if self.reasoning != "none":
            frame = {"name": "frame", "lark_grammar": _THOUGHT[self.reasoning] + _THOUGHT_END}
            grammars.insert(0, frame)
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _answer(self) -> dict[str, Any]:
        match self.kind:
            case "json_object":
                return {"json_schema": with_json_options({"type": "object"})}
            case "json_schema":
                return {"json_schema": with_json_options(self._schema())}
            case "regex":
                return {
                    "lark_grammar": json.loads(LLMatcher.grammar_from_regex(self.source))["grammars"][0]["lark_grammar"]
                }
            case "gbnf":
                check_rules(self.source, "::=", name=self._name)
                return {"lark_grammar": gbnf_to_lark(self.source)}
            case "lark":
                if not self.is_generated:
                    check_rules(self.source, ":", name=self._name)
                return {"lark_grammar": self.source}

    def _schema(self) -> Any:
        try:
            schema = json.loads(self.source)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the JSON schema is no JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise UserError(f"the JSON schema is {type(schema).__name__}; it must be an object")
        check_schema_size(schema)
        check_bytes(json.dumps(schema, ensure_ascii=False), name=self._name)  # escaped ones are seen only now
        return schema

    def _fault(self, report: str) -> UserError:
        where = ""
        if self.kind == "json_schema":

            def fails(schema: Any) -> bool:
                text = json.dumps({"grammars": [{"json_schema": with_json_options(schema)}]})
                return LLMatcher.validate_grammar(text) == report

            where = f" at {schema_path(json.loads(self.source), fails)}"
        return UserError(f"the {self._name} is wrong or not supported{where}: {reason_of(report, kind=self.kind)}")


class CompiledGrammar:
    """A grammar ready for use with one vocabulary; safe to share between threads."""

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary, *, matcher: LLMatcher) -> None:
        """Use `Grammar.compile`. Raises UserError when no answer at all can follow the grammar."""
        self.grammar = grammar
        self.vocabulary = vocabulary
        self._matcher = matcher
        self.start().mask()

    def start(self) -> "GrammarState":
        """The state before the first token; cheap."""
        return GrammarState(self.vocabulary, self._matcher.deep_copy())


class GrammarState:
    """How far an answer is. Feed it the tokens in order; `rollback` takes the last ones back."""

    def __init__(self, vocabulary: GrammarVocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._n_accepted = 0
        self._has_ended = False  # kept here: whether llguidance takes an end depends on how it stopped

    def mask(self) -> NDArray[np.bool_]:
        """bool [n_vocab]: the tokens that may come next, at least one; the ends of an answer exactly where the grammar
        may end, padding never, other control tokens only where a Lark grammar names them. Text that is forced is
        offered as the tokenizer would cut it.

        Raises UserError when the grammar leads nowhere from here or grew too complex for llguidance's limits.
        """
        n_tokens = self._vocabulary.n_tokens
        mask = np.zeros(self._vocabulary.n_vocab, dtype=np.bool_)
        if self._has_ended:
            mask[self._vocabulary.ends] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # the mask then allows the end, which would pass for a complete answer
            reason = reason_of(self._matcher.get_error(), kind="lark")
            raise UserError(f"the grammar cannot be followed after {self._n_accepted} tokens: {reason}")
        mask[:n_tokens] = np.unpackbits(bits, count=n_tokens, bitorder="little")
        if not mask.any():
            raise UserError(f"the grammar allows nothing more after {self._n_accepted} tokens, not even the end")
        return mask

    def accept(self, token: int) -> None:
        """Go on by one token. Raises EngineFailed for a token that `mask` does not allow, and the state is as before.

        Where the grammar grows too complex here, the next `mask` says so, and the state stays unusable.
        """
        if not self._try_accept(token) and not self._matcher.is_error():
            raise EngineFailed(f"token {token} is not what the grammar allows after {self._n_accepted} tokens")
        self._n_accepted += 1

    def _try_accept(self, token: int) -> bool:
        if self._has_ended or not 0 <= token < self._vocabulary.n_tokens:
            return False
        if token in self._vocabulary.ends:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        return self._matcher.try_consume_tokens([token]) == 1

    @property
    def is_done(self) -> bool:
        """True when nothing but the end may follow, or the end was accepted."""
        if self._has_ended:
            return True
        return self._matcher.is_stopped() and self._matcher.is_accepting() and not self._matcher.is_error()

    def rollback(self, n: int) -> None:
        """Take the last `n` accepted tokens back. Raises EngineFailed when there are fewer."""
        if not 0 <= n <= self._n_accepted:
            raise EngineFailed(f"{n} tokens cannot be taken back from a grammar that has {self._n_accepted}")
        if n == 0:
            return
        self._n_accepted -= n
        n -= self._has_ended
        self._has_ended = False
        if n and not self._matcher.is_error() and not self._matcher.rollback(n):
            raise EngineFailed(f"the grammar cannot take {n} tokens back: {self._matcher.get_error()[:200]}")

    def clone(self) -> "GrammarState":
        """A state of its own at the same place."""
        copy = GrammarState(self._vocabulary, self._matcher.deep_copy())
        copy._n_accepted, copy._has_ended = self._n_accepted, self._has_ended
        return copy
