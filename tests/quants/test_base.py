import pytest
import torch

from makeway.gguf.types import BLOCK_SIZES
from makeway.quants import QUANT_TYPES
from makeway.quants.base import f16_scales, words
from tests.quants.blocks import ALL_TYPES


@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_fields_cover_the_block_in_order(ggml_type):
    quant = QUANT_TYPES[ggml_type]
    end = 0
    for field in quant.FIELDS:
        assert field.offset == end, f"{field.name} starts at {field.offset}, not {end}"
        assert field.n_bytes > 0
        assert field.meaning
        end += field.n_bytes
    assert end == quant.block_bytes
    assert len({field.name for field in quant.FIELDS}) == len(quant.FIELDS)


@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_block_size_is_that_of_the_file_format(ggml_type):
    quant = QUANT_TYPES[ggml_type]
    size = BLOCK_SIZES[ggml_type]
    assert (quant.ggml, quant.block_elements, quant.block_bytes) == (ggml_type, size.elements, size.n_bytes)


def test_words_are_a_view_when_aligned_and_a_copy_when_not():
    raw = torch.arange(64, dtype=torch.uint8)
    aligned = words(raw.view(4, 16), 8, 8, torch.int64)
    assert aligned.data_ptr() == raw.data_ptr() + 8
    odd = words(raw[1:61].view(4, 15), 2, 8, torch.int64)
    assert odd.view(torch.uint8).tolist() == [list(range(3 + 15 * i, 11 + 15 * i)) for i in range(4)]


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("n", [0, 1, 3])
def test_words_of_one_block_at_any_offset(offset, n):
    raw = torch.arange(100, dtype=torch.uint8)
    blocks = raw[offset : offset + 18 * n].view(n, 18)
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert words(blocks, 2, 16, dtype).view(torch.uint8).tolist() == blocks[:, 2:].tolist()


def test_f16_scales():
    blocks = torch.tensor([[1.5, -2.0, 6e-8], [65504.0, 0.0, -0.0]]).half().view(torch.uint8)
    assert f16_scales(blocks, 0).tolist() == [[1.5], [65504.0]]
    assert f16_scales(blocks, 2, 2).tolist() == [[-2.0, 2.0**-24], [0.0, -0.0]]
