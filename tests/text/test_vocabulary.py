import pytest

from makeway.errors import UserError
from makeway.text import Tokenizer
from tests.text.test_tokenizer import changed, metadata


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_metadata(metadata(), source="test")


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
        ({"tokenizer.ggml.model": None}, "'tokenizer.ggml.model' is missing"),
        ({"tokenizer.ggml.pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": 3}, "'tokenizer.ggml.merges' is not an array of strings"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "entry 0"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "'tokenizer.ggml.tokens' is not an array of strings"),
        ({"tokenizer.ggml.tokens": []}, "token_type' has 512 entries for 0 tokens"),
        ({"tokenizer.ggml.token_type": None}, "'tokenizer.ggml.token_type' is missing"),
        ({"tokenizer.ggml.token_type": [1.5] * 512}, "not an array of integers"),
        ({"tokenizer.ggml.token_type": [9] * 512}, "holds 9, which is no token type"),
        ({"tokenizer.ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id' is -1"),
        ({"tokenizer.ggml.padding_token_id": "x"}, "tokenizer.ggml.padding_token_id' is 'x'"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.bos_token_id' is missing although"),
        ({"tokenizer.ggml.add_eos_token": 2}, "tokenizer.ggml.add_eos_token' is 2"),
        ({"tokenizer.chat_template": 2}, "'tokenizer.chat_template' is 2"),
        ({"tokenizer.chat_template.tool_use": 2}, "'tokenizer.chat_template.tool_use' is 2"),
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


def test_a_vocabulary_with_a_hole_or_a_double_is_refused():
    tokens = metadata()["tokenizer.ggml.tokens"]
    with pytest.raises(UserError, match=r"FILE: 'tokenizer.ggml.tokens' holds '!' twice \(ids 0 and 400\)"):
        changed(tokens=[*tokens[:400], tokens[0], *tokens[401:]], merges=[])
    with pytest.raises(UserError, match="no token for byte 0x21"):
        changed(tokens=["nothing", *tokens[1:]], merges=[])
    types = [5 if i == 400 else t for i, t in enumerate(metadata()["tokenizer.ggml.token_type"])]
    filled = changed(tokens=[*tokens[:400], tokens[0], *tokens[401:]], merges=[], token_type=types)
    assert filled.encode(tokens[0]) == [0]
    assert filled.token_bytes(400) == b""


def test_some_token_must_end_an_answer():
    data = metadata()
    del data["tokenizer.ggml.eos_token_id"]
    data["tokenizer.ggml.token_type"] = [1] * 512
    with pytest.raises(UserError, match=r"'tokenizer.ggml.eos_token_id' is missing"):
        Tokenizer.from_metadata(data, source="FILE")


def test_what_ends_an_answer(tokenizer):
    names = ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_ids == {tokenizer.encode(name)[0] for name in names}
    data = metadata()
    tokens, types = list(data["tokenizer.ggml.tokens"]), list(data["tokenizer.ggml.token_type"])
    tokens[400:403] = ["<|eot_id|>", "</s>", "<|eom_id|>"]
    types[400:403] = [3, 1, 4]
    ends = changed(tokens=tokens, token_type=types, merges=[], eot_token_id=7).eos_ids
    assert ends == tokenizer.eos_ids | {400, 402, 7}, "an ordinary token '</s>' is text"


def test_chat_templates_by_name(tokenizer):
    assert "<|im_start|>" in tokenizer.chat_template
    data = metadata() | {"tokenizer.chat_template.tool_use": "T"}
    del data["tokenizer.chat_template"]
    named = Tokenizer.from_metadata(data, source="FILE")
    assert named.chat_template is None
    assert named.chat_templates == {"tool_use": "T"}
