import json

import numpy as np
import pytest

from makeway.gguf import BLOCK_SIZES, GGMLType, row_bytes
from tests.conftest import golden_path


def sizes_of_gguf_package():
    """Name -> (number, (elements, bytes)) as gguf-py has them."""
    from gguf.constants import GGML_QUANT_SIZES  # here, because linters may take the package for this folder

    return {t.name: (int(t), size) for t, size in GGML_QUANT_SIZES.items()}


def test_every_type_has_a_block_size():
    assert set(BLOCK_SIZES) == set(GGMLType)


@pytest.mark.parametrize("ggml_type", list(GGMLType), ids=lambda t: t.name)
def test_block_sizes_agree_with_the_gguf_package(ggml_type):
    sizes = sizes_of_gguf_package()
    block = BLOCK_SIZES[ggml_type]
    if ggml_type is GGMLType.Q8_1:  # gguf-py counts two f32 in its head, ggml's C struct has two f16
        assert sizes["Q8_1"] == (9, (32, 40))
        assert (block.elements, block.n_bytes) == (32, 2 + 2 + 32)
    elif ggml_type is GGMLType.Q2_0:  # newer than the package; the golden blocks come from ggml itself
        assert sizes.get("Q2_0", (42, (64, 18))) == (ggml_type, (block.elements, block.n_bytes))
    else:
        assert sizes[ggml_type.name] == (ggml_type, (block.elements, block.n_bytes))


def test_every_type_of_the_gguf_package_is_known():
    assert set(sizes_of_gguf_package()) <= {t.name for t in GGMLType}


def test_block_sizes_agree_with_ggml():
    listed = json.loads(golden_path("dequant.json").read_text())
    blocks = np.load(golden_path("dequant.npz"))
    for name, entry in listed.items():
        if name not in GGMLType.__members__ or "id" not in entry:
            continue
        block = BLOCK_SIZES[GGMLType[name]]
        assert (GGMLType[name], block.elements, block.n_bytes) == (entry["id"], entry["block"], entry["bytes"])
        assert blocks[f"{name}_raw"].shape[1] == block.n_bytes
    assert "Q2_0" in listed


def test_row_bytes():
    assert row_bytes(GGMLType.Q4_K, 2560) == 10 * 144
    assert row_bytes(GGMLType.F32, 0) == 0
    with pytest.raises(ValueError, match="no multiple of the Q4_K block 256"):
        row_bytes(GGMLType.Q4_K, 640)
