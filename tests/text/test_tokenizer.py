import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import UserError
from makeway.gguf import open_gguf
from makeway.text import Tokenizer
from tests.conftest import SHARED, golden_path

MODELS = {
    "qwen3moe-base": "qwen3moe-base-bf16.gguf",
    "qwen3next-base": "qwen3next-base-bf16.gguf",
    "qwen35moe-base": "qwen35moe-base-bf16.gguf",
    "qwen4exp-k96": "qwen4exp-k96-UD-Q4_K_XL.gguf",
    "qwen3moe-k256": "qwen3moe-k256-Q4_K_M.gguf",
    "qwen4exp-base": "qwen4exp-base-bf16.gguf",
    "qwen4exp-k256": "qwen4exp-k256-Q4_K_M.gguf",
}


def metadata(file="qwen3moe-base-bf16.gguf"):
    with open_gguf(golden_path(file)) as f:
        return dict(f.metadata)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_metadata(metadata(), source="test")


@pytest.fixture(scope="module")
def big_metadata():
    if not SHARED.exists():
        pytest.skip("the published vocabulary is not shipped with the tests")
    return metadata("tokenizer/vocab-qwen35.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_transformers(name):
    vectors = json.loads(golden_path("tokenize.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_metadata(metadata(MODELS[name]), source=name)
    for text, ids in zip(vectors["strings"], vectors[name]["hf"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
def test_published_vectors(big_metadata, pre):
    """llama.cpp's vectors; it does not normalise, so for decomposed text the ids are those of the composed text's."""
    tokenizer = Tokenizer.from_metadata(big_metadata | {"tokenizer.ggml.pre": pre}, source=pre)
    folder = SHARED / "tokenizer"
    texts = (folder / f"{pre}.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{pre}.out").read_text(encoding="utf-8").split("\n")[: len(texts)]
    n_exact = 0
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, parse_special=False)
        if unicodedata.normalize("NFC", text) == text:
            assert ids == [int(i) for i in line.split()], text
            n_exact += 1
        else:
            assert ids == tokenizer.encode(unicodedata.normalize("NFC", text), parse_special=False)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert n_exact >= 46


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_random_unicode_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == unicodedata.normalize("NFC", text).encode()


def test_special_tokens_only_where_they_are_wanted(tokenizer):
    text = "a<|im_end|>b"
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    assert tokenizer.is_special(end[0])
    assert end[0] in tokenizer.eos_ids
    assert end[0] in tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert end[0] not in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == "ab"


def test_bad_input_is_named(tokenizer):
    with pytest.raises(UserError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(UserError, match="out of range"):
        tokenizer.decode([tokenizer.n_tokens])
    with pytest.raises(UserError, match="out of range"):
        tokenizer.token_bytes(-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "byte-level BPE"),
        ({"tokenizer.ggml.pre": "martian"}, "makeway knows gpt-2, qwen2, qwen35"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "has 2 entries for"),
        ({"tokenizer.ggml.merges": ["no token"]}, "entry 0"),
        ({"tokenizer.ggml.merges": ["a"]}, "entry 0"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_faulty_vocabularies_are_refused(change, message):
    data = metadata()
    for key, value in change.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.from_metadata(data, source="FILE")
    assert str(error.value).startswith("FILE: ")
