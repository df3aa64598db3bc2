import json
import random

import jsonschema
import numpy as np
import pytest

from makeway import UserError
from makeway.gguf import open_gguf
from makeway.text import Tokenizer
from makeway.text.grammar import GrammarVocabulary
from makeway.text.tool_grammar import tool_grammar
from makeway.text.tools import ToolParser
from tests.conftest import ROOT
from tests.text.test_tools import calls_of, content_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {
                "type": "object",
                "properties": {
                    "to": {"type": "string"},
                    "n": {"type": "integer", "minimum": 1, "maximum": 99},
                    "how": {"enum": ["run", 'a "b"', "é/ü"]},
                    "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
                },
                "required": ["how", "n"],
                "additionalProperties": False,
                "$defs": {"flag": {"type": "boolean"}},
            },
        },
    },
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "additionalProperties": False}}},
    {"type": "function", "function": {"name": "say"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


@pytest.fixture(scope="module")
def tokenizer():
    path = ROOT / "src" / "makeway" / "data" / "demo.gguf"
    with open_gguf(path) as file:
        return Tokenizer.from_metadata(file.metadata, source=path.name)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return GrammarVocabulary(tokenizer)


def walk(compiled, tokenizer, seed):
    """A random answer that follows the grammar; where much is possible it soon takes what ends a text."""
    random_ = random.Random(seed)
    quote = tokenizer.encode('"')[0]
    state, ids, closing = compiled.start(), [], iter(())
    while True:
        mask = state.mask()
        ends = [i for i in tokenizer.eos_ids if mask[i]]
        if ends and (state.is_done or random_.random() < 0.5):
            return tokenizer.decode(ids)
        mask[list(tokenizer.eos_ids)] = False
        choices = np.flatnonzero(mask)
        token = int(random_.choice(choices))
        if len(choices) > 1000:  # inside a text
            if random_.random() < 0.3:
                closing = iter(tokenizer.encode("\n</parameter>\n"))
            token = quote if mask[quote] and random_.random() < 0.3 else next(closing, token)
        token = token if mask[token] else int(random_.choice(choices))
        state.accept(token)
        ids.append(token)
        assert len(ids) < 3000


@pytest.mark.parametrize("format", ["hermes", "xml"])
def test_a_forced_answer_is_calls_that_follow_the_schemas(tokenizer, vocabulary, format):
    compiled = tool_grammar(TOOLS, "required", format).compile(vocabulary)
    names = set()
    for seed in range(40):
        text = walk(compiled, tokenizer, seed)
        parser = ToolParser(format, TOOLS)
        pieces = parser.push(text) + parser.flush()
        calls = calls_of(pieces)
        assert calls
        assert content_of(pieces) == ""
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
            names.add(name)
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("format", ["hermes", "xml"])
def test_one_function_and_one_call(tokenizer, vocabulary, format):
    choice = {"type": "function", "function": {"name": "look"}}
    compiled = tool_grammar(TOOLS, choice, format, parallel=False).compile(vocabulary)
    texts = {walk(compiled, tokenizer, seed) for seed in range(10)}
    parsers = [ToolParser(format, TOOLS) for _ in texts]
    calls = [calls_of(p.push(text) + p.flush()) for p, text in zip(parsers, texts, strict=True)]
    assert calls == [[("look", {})]] * len(texts)


def test_reasoning_may_come_before_a_forced_call(vocabulary, tokenizer):
    state = tool_grammar(TOOLS, "required", "hermes", reasoning="open").compile(vocabulary).start()
    for token in tokenizer.encode("hm {"):
        state.accept(token)
    assert not state.mask()[list(tokenizer.eos_ids)].any()


def test_markers_that_are_whole_tokens_are_written_as_such():
    """Qwen's vocabularies have the tags as tokens that are text (user-defined ones)."""
    path = ROOT / "src" / "makeway" / "data" / "demo.gguf"
    with open_gguf(path) as file:
        metadata = dict(file.metadata)
    tags = {metadata["tokenizer.ggml.tokens"].index(tag): tag for tag in ("</think>", "<tool_call>")}
    types = np.array(metadata["tokenizer.ggml.token_type"])
    types[list(tags)] = 4
    metadata["tokenizer.ggml.token_type"] = types
    tokenizer = Tokenizer.from_metadata(metadata, source="test")
    close, call = tags
    state = tool_grammar(TOOLS, "required", "hermes", reasoning="open").compile(GrammarVocabulary(tokenizer)).start()
    for token in (*tokenizer.encode("hm <tool_call>"), close, *tokenizer.encode("\n\n")):
        state.accept(token)
    mask = state.mask()
    assert mask[call]
    state.accept(call)
    (only,) = np.flatnonzero(state.mask())
    assert tokenizer.token_bytes(int(only)).startswith(b"\n")


@pytest.mark.parametrize("format", ["hermes", "xml"])
@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([], "required", "no tools"),
        (TOOLS, {"function": {"name": "fly"}}, "'fly', which is none of the tools: move, look, say"),
        (TOOLS, "auto", "tool_choice must be"),
        (TOOLS, {"function": 5}, "tool_choice must be"),
        ([{"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}], "required", "'f'.*#/properties/a"),
        ([{"name": "f", "parameters": {"type": "array"}}], "required", "'f'.*object"),
        ([{"name": "f", "parameters": {"not": {}}}], "required", "Unimplemented"),
        ([5], "required", r"tools\[0\]"),
    ],
)
def test_what_cannot_be_forced_is_refused(format, tools, choice, words):
    with pytest.raises(UserError, match=words):
        tool_grammar(tools, choice, format)


def test_parameters_that_the_xml_form_cannot_write_are_refused():
    tools = [{"name": "f", "parameters": {"properties": {"a>b": {}}}}]
    with pytest.raises(UserError, match="'a>b' of tool 'f'"):
        tool_grammar(tools, "required", "xml")
    assert json.dumps("a>b") in tool_grammar(tools, "required", "hermes").source
