import pytest
import torch

from makeway.quants.plain import BF16, F16, F32

VALUES = [0.0, -0.0, 1.0, -2.5, 65504.0, 2.0**-24, float("inf"), float("-inf")]


@pytest.mark.parametrize(("quant", "dtype"), [(F32(), torch.float32), (F16(), torch.float16), (BF16(), torch.bfloat16)])
def test_values(quant, dtype):
    stored = torch.tensor(VALUES).to(dtype)
    decoded = quant.decode(stored.view(-1, 1).view(torch.uint8))
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded[:, 0], stored.float())
    assert decoded[1, 0].signbit()


@pytest.mark.parametrize(("quant", "dtype"), [(F16(), torch.float16), (BF16(), torch.bfloat16)])
def test_every_bit_pattern(quant, dtype):
    stored = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    decoded = quant.decode(stored.view(-1, 1).view(torch.uint8))[:, 0]
    assert torch.equal(decoded.nan_to_num(7.0), stored.float().nan_to_num(7.0))
    assert int(decoded.isnan().sum()) == 2 * ((1 << (10 if dtype == torch.float16 else 7)) - 1)


def test_f32_is_a_view_when_aligned():
    blocks = torch.zeros((4, 4), dtype=torch.uint8)
    assert F32().decode(blocks).data_ptr() == blocks.data_ptr()
