import numpy as np
import pytest

from makeway.errors import UserError
from makeway.gguf import Metadata

VALUES = {
    "int": 48,
    "float": 1e-6,
    "nan": float("nan"),
    "bool": True,
    "str": "qwen4exp",
    "u64": np.array([(1 << 64) - 1, 3], np.uint64),
    "i32": np.array([-1, 3], np.int32),
    "f32": np.array([0.5, 2], np.float32),
    "infs": np.array([0.5, np.inf], np.float32),
    "bools": np.array([True, False]),
    "strs": ["a", "b"],
    "none": [],
    "nested": [["a"], ["b"]],
}


@pytest.fixture
def metadata():
    return Metadata(dict(VALUES), "m.gguf")


def test_it_is_a_mapping(metadata):
    assert list(metadata) == list(VALUES)
    assert len(metadata) == len(VALUES)
    assert metadata["int"] == 48
    assert "int" in metadata
    assert metadata.get("other") is None
    with pytest.raises(TypeError):
        metadata["int"] = 3


def test_getters(metadata):
    assert metadata.get_int("int") == 48
    assert metadata.get_float("float") == 1e-6
    assert metadata.get_float("int") == 48.0
    assert isinstance(metadata.get_float("int"), float)
    assert metadata.get_bool("bool") is True
    assert metadata.get_str("str") == "qwen4exp"
    assert metadata.get_ints("u64") == ((1 << 64) - 1, 3)
    assert metadata.get_ints("i32", length=2) == (-1, 3)
    assert metadata.get_floats("f32") == (0.5, 2.0)
    assert metadata.get_floats("i32") == (-1.0, 3.0)
    assert metadata.get_bools("bools") == (True, False)
    assert metadata.get_strs("strs") == ("a", "b")
    assert metadata.get_ints("none") == ()
    assert all(type(v) is int for v in metadata.get_ints("u64"))


def test_a_single_value_stands_for_all_layers(metadata):
    assert metadata.get_ints("int", length=3) == (48, 48, 48)
    assert metadata.get_bools("bool", length=2) == (True, True)
    assert metadata.get_strs("str", length=1) == ("qwen4exp",)
    with pytest.raises(UserError, match="should hold an array of 1099511627776 integers, but is the integer 48"):
        metadata.get_ints("int", length=1 << 40)


def test_defaults_are_for_missing_keys_only(metadata):
    assert metadata.get_int("no", 5) == 5
    assert metadata.get_str("no", None) is None
    assert metadata.get_ints("no", ()) == ()
    assert metadata.get_bools("no", default=(True,), length=3) == (True,)
    with pytest.raises(UserError):
        metadata.get_int("str", 5)


@pytest.mark.parametrize("kind", ["int", "float", "bool", "str", "ints", "floats", "bools", "strs"])
def test_a_missing_key_is_named(metadata, kind):
    with pytest.raises(UserError, match=r"m\.gguf: key 'qwen4exp\.x' is missing \(it should hold an? .*\); convert"):
        getattr(metadata, f"get_{kind}")("qwen4exp.x")


@pytest.mark.parametrize(
    ("getter", "key", "found"),
    [
        ("get_int", "bool", "an integer, but is the bool True"),
        ("get_int", "float", "an integer, but is the float 1e-06"),
        ("get_int", "i32", "an integer, but is an array of 2 int32"),
        ("get_float", "nan", "a finite number, but is the float nan"),
        ("get_float", "str", "a finite number, but is the string 'qwen4exp'"),
        ("get_float", "bool", "a finite number, but is the bool True"),
        ("get_bool", "int", "a bool, but is the integer 48"),
        ("get_str", "strs", "a string, but is an array of 2 strings"),
        ("get_ints", "int", "an array of integers, but is the integer 48"),
        ("get_ints", "bools", "an array of integers, but is an array of 2 bool"),
        ("get_ints", "strs", "an array of integers, but is an array of 2 strings"),
        ("get_ints", "f32", "an array of integers, but is an array of 2 float32"),
        ("get_floats", "infs", "an array of finite numbers, but is an array of 2 float32"),
        ("get_bools", "i32", "an array of bools, but is an array of 2 int32"),
        ("get_strs", "str", "an array of strings, but is the string 'qwen4exp'"),
        ("get_strs", "nested", "an array of strings, but is an array of 2 entries"),
    ],
)
def test_a_wrong_kind_is_named(metadata, getter, key, found):
    with pytest.raises(UserError) as error:
        getattr(metadata, getter)(key)
    assert f"m.gguf: key '{key}' should hold {found}; convert" in str(error.value)


def test_a_wrong_length_is_named(metadata):
    with pytest.raises(UserError, match="an array of 3 integers, but is an array of 2 int32"):
        metadata.get_ints("i32", length=3)


def test_numbers_too_large_for_a_float(metadata):
    assert Metadata({"k": (1 << 64) - 1}, "m").get_float("k") == float(1 << 64)
