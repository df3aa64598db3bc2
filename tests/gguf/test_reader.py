import gc
import sys
import time
import tracemalloc

import numpy as np
import pytest

from makeway.bench.gguf_writer import write_gguf
from makeway.errors import UserError
from makeway.gguf import GGMLType, open_gguf
from tests.conftest import DATA, SHARED, golden_path
from tests.gguf.checks import check_tensors

GOLDEN = sorted({p.name for folder in (DATA, SHARED) for p in folder.glob("*.gguf")})


def read_with_gguf_package(path):
    from gguf import GGUFReader  # here, because linters may take the package for this folder and sort it so

    return GGUFReader(path)


@pytest.fixture
def small(tmp_path):
    tensors = {"a": (GGMLType.F32, (2, 3), np.arange(6, dtype=np.float32).tobytes())}
    write_gguf(tmp_path / "m.gguf", {"n": 3, "x": 1.5, "b": True, "s": "t", "l": [1, 2]}, tensors)
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_read_as_the_gguf_package_reads_them(name):
    path = golden_path(name)
    theirs = read_with_gguf_package(path)
    with open_gguf(path) as ours:
        check_tensors(ours)
        assert ours.version == theirs.fields["GGUF.version"].contents()
        assert ours.alignment == theirs.alignment
        assert ours.n_bytes == path.stat().st_size
        keys = [k for k in theirs.fields if not k.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for key in keys:
            field, value = theirs.fields[key], ours.metadata[key]
            if isinstance(value, np.ndarray):
                assert value.dtype == np.asarray(field.parts[field.data[0]]).dtype
                assert value.tolist() == field.contents()
            else:
                assert value == field.contents()
                assert isinstance(value, bool) == (field.types[0].name == "BOOL")
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for their in theirs.tensors:
            info = ours.tensors[their.name]
            assert info.type == their.tensor_type
            assert info.shape == tuple(reversed(their.shape.tolist()))
            assert (info.offset, info.n_bytes) == (their.data_offset, their.n_bytes)
            assert info.n_elements == their.n_elements
            np.testing.assert_array_equal(ours.bytes_of(info.name), their.data.view(np.uint8).reshape(-1))


def test_there_are_golden_files():
    assert {"qwen4exp-k96-UD-Q4_K_XL.gguf", "qwen3moe-k256-Q4_K_M.gguf"} <= set(GOLDEN)


def test_the_gguf_package_reads_what_the_test_writer_writes(small):
    theirs = read_with_gguf_package(small)
    assert [theirs.fields[k].contents() for k in "nxbsl"] == [3, 1.5, True, "t", [1, 2]]
    assert theirs.tensors[0].data.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bytes_are_views_that_outlive_the_file(small):
    file = open_gguf(small)
    view = file.bytes_of("a")
    assert view.dtype == np.uint8
    assert view.shape == (24,)
    assert not view.flags.writeable
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    file.close()
    file.close()
    del file
    gc.collect()
    assert view.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_closed_file_keeps_metadata_and_gives_no_bytes(small):
    with open_gguf(small) as file:
        pass
    assert file.get_int("n") == 3
    assert file.tensors["a"].shape == (2, 3)
    with pytest.raises(ValueError, match="closed"):
        file.bytes_of("a")


def test_close_unmaps_when_nothing_looks_in(small):
    with open_gguf(small) as file:
        buffer = file._shards[small].buffer
        assert not buffer.closed
        file.bytes_of("a")
    assert buffer.closed


def test_the_file_is_closed_after_an_error(small):
    with pytest.raises(RuntimeError, match="theirs"), open_gguf(small) as file:
        raise RuntimeError("theirs")
    with pytest.raises(ValueError, match="closed"):
        file.bytes_of("a")


def test_a_missing_tensor_is_named(small):
    with open_gguf(str(small)) as file:
        for get in (file.bytes_of, file.get_tensor):
            with pytest.raises(UserError, match=r"m\.gguf: tensor 'output\.weight' is missing; "):
                get("output.weight")
        assert file.get_tensor("a") is file.tensors["a"]


def test_the_mappings_are_read_only(small):
    with open_gguf(small) as file:
        with pytest.raises(TypeError):
            file.tensors["b"] = file.tensors["a"]
        with pytest.raises(AttributeError):
            file.tensors["a"].offset = 0


def test_getters_are_those_of_the_metadata(small):
    with open_gguf(small) as file:
        assert file.get_int("n") == 3
        assert file.get_float("x") == 1.5
        assert file.get_bool("b") is True
        assert file.get_str("s") == "t"
        assert file.get_ints("l") == (1, 2)
        assert file.get_ints("none", (), length=3) == ()
        assert file.get_floats("l") == (1.0, 2.0)
        assert file.get_bools("b", length=2) == (True, True)
        assert file.get_strs("s", length=1) == ("t",)
        assert str(small) in repr(file)


def test_it_needs_no_torch():
    for name, module in list(sys.modules.items()):
        if name.startswith("makeway.gguf"):
            assert not any(getattr(v, "__name__", "").startswith("torch") for v in vars(module).values())


def test_a_model_of_111_gb_opens_without_its_bytes(tmp_path):
    """Four sparse shards with the shapes of Flash-Next: nothing of the size of the data is allocated."""
    experts = {}
    for i in range(48):
        experts[f"blk.{i}.ffn_gate_exps.weight"] = (GGMLType.Q4_K, (512, 640, 2560), None)
        experts[f"blk.{i}.ffn_up_exps.weight"] = (GGMLType.Q4_K, (512, 640, 2560), None)
        experts[f"blk.{i}.ffn_down_exps.weight"] = (GGMLType.Q5_1, (512, 2560, 640), None)
    experts["per_layer_token_embd.weight"] = (GGMLType.IQ4_NL, (320_001_536, 160), None)
    paths = write_gguf(tmp_path / "m.gguf", {}, experts, split=(0, 60, 84, 1), sparse=True)
    tracemalloc.start()
    try:
        with open_gguf(paths[2]) as file:
            assert sum(t.n_bytes for t in file.tensors.values()) == 48 * 512 * 3_072_000 + 320_001_536 * 90
            assert 100e9 < file.n_bytes < 111e9
            rows = file.bytes_of("per_layer_token_embd.weight").reshape(-1, 90)
            assert not rows[320_001_535].any()
            check_tensors(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_large_vocabulary_opens_fast_enough(tmp_path):
    """A guard with room for slow machines; bench/gguf_open.py measures."""
    tokens = [f"Ġtoken{i}" for i in range(248_320)]
    write_gguf(tmp_path / "m.gguf", {"tokens": tokens, "merges": tokens, "types": np.ones(248_320, np.int32)}, {})
    took_s = []
    for _ in range(3):
        start = time.process_time()
        with open_gguf(tmp_path / "m.gguf") as file:
            took_s.append(time.process_time() - start)
    assert min(took_s) < 1.0
    assert file.metadata["tokens"] == file.metadata["merges"] == tokens
