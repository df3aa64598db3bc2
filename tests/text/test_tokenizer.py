import json
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
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
# Surrogates are no text, and what is not assigned yet may compose in one Unicode version and not in another.
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])


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


def test_published_vectors_of_decomposed_text(big_metadata):
    """llama.cpp does not compose; without that step marks stay with their letters and its ids are ours too."""
    tokenizer = Tokenizer.from_metadata(big_metadata, source="qwen35")
    tokenizer._plain.normalizer = None
    folder = SHARED / "tokenizer"
    texts = (folder / "qwen35.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / "qwen35.out").read_text(encoding="utf-8").split("\n")[: len(texts)]
    n_decomposed = sum(unicodedata.normalize("NFC", text) != text for text in texts)
    assert n_decomposed == 3
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, parse_special=False) == [int(i) for i in line.split()], text


@settings(max_examples=300, deadline=None)
@given(text=st.text(ASSIGNED, max_size=60))
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


def changed(**values):
    return Tokenizer.from_metadata(
        metadata() | {f"tokenizer.ggml.{key}": value for key, value in values.items()}, source="FILE"
    )


def test_bos_and_eos_only_where_the_model_wants_them(tokenizer):
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special=False) == [64]
    both = changed(bos_token_id=504, add_bos_token=True, add_eos_token=True)
    assert both.encode("a") == [504, 64, 506]
    assert both.encode("a", add_special=False) == [64]
    assert (both.bos_id, both.eos_id, both.padding_id) == (504, 506, 504)
    assert (both.bos_token, both.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_end|>", "")


def test_user_defined_tokens_are_text_that_is_always_kept_whole():
    types = list(metadata()["tokenizer.ggml.token_type"])
    types[507] = 4
    tokenizer = changed(token_type=types)
    assert tokenizer.encode("a<think>", parse_special=False) == [64, 507]
    assert not tokenizer.is_special(507)
    assert tokenizer.decode([64, 507, 506], skip_special=True) == "a<think>"


def test_gpt2_cuts_and_does_not_compose():
    tokenizer = changed(pre="gpt-2")
    for text in ("e\u0301", "It's 2024's\n\n  end ", "12 345"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_numpy_ids_are_ids_and_fractions_are_not(tokenizer):
    assert tokenizer.decode(np.array([64, 65], dtype=np.int32)) == "ab"
    with pytest.raises(UserError, match="no integer"):
        tokenizer.token_bytes(1.5)
    with pytest.raises(UserError, match="out of range"):
        tokenizer.is_special(-1)


def test_threads_do_not_mix_up_how_control_tokens_are_read(tokenizer):
    text = "a<|im_end|>b" * 20
    wanted = {flag: tokenizer.encode(text, parse_special=flag) for flag in (True, False)}
    flags = [i % 2 == 0 for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda flag: tokenizer.encode(text, parse_special=flag), flags))
    assert all(ids == wanted[flag] for flag, ids in zip(flags, results, strict=True))


def test_a_published_vocabulary_builds_quickly(big_metadata):
    start = time.process_time()
    tokenizer = Tokenizer.from_metadata(big_metadata, source="FILE")
    assert time.process_time() - start < 5, "0.5 s alone on a small machine"
    assert tokenizer.n_tokens == 151_936
    text = "👩‍👩‍👧‍👦 🏳️‍🌈 नमस्ते שָׁלוֹם ญี่ปุ่น ﷽ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢ \x00\x7f\u2028\ufeff\U000e0001"
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
