import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.gguf.types import BLOCK_SIZES, GGMLType, row_bytes
from makeway.quants import ENCODERS, decode_rows, encode_rows

EACH_TYPE = pytest.mark.parametrize("ggml_type", list(ENCODERS), ids=lambda t: t.name)
# half a step of the type as a share of the largest magnitude of a block (of 32 or 256), with room for f16 scales
# and quantised sub-block scales; asymmetric types pay for the range, which is at most twice the magnitude
BOUND = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q4_0": 1.02 / 8,  # the far end of the sign that the extreme does not have is clipped by one step
    "Q5_0": 1.02 / 16,
    "Q4_1": 1.02 / 15,
    "Q5_1": 1.02 / 31,
    "Q8_0": 1.02 / 254,
    "Q4_K": 1.1 / 15,
    "Q6_K": 1.1 / 62,
}


def worst_share(x: torch.Tensor, ggml_type: GGMLType) -> float:
    block = max(32, BLOCK_SIZES[ggml_type].elements)  # tiny f16 values have fewer bits than their neighbours
    error = (decode_rows(encode_rows(x, ggml_type), ggml_type) - x).abs().view(-1, block).amax(dim=1)
    return float((error / x.abs().view(-1, block).amax(dim=1).clamp_min(1e-30)).max())


@EACH_TYPE
@pytest.mark.parametrize("kind", ["normal", "outliers", "positive", "negative", "offset", "one-hot"])
def test_the_error_is_below_the_step_of_the_type(ggml_type, kind):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((40, 512), generator=generator)
    if kind == "outliers":
        x[:, ::37] *= 30
    elif kind == "positive":
        x = x.abs()
    elif kind == "negative":
        x = -x.abs()
    elif kind == "offset":
        x = x * 0.1 + 3
    elif kind == "one-hot":
        x = torch.eye(512)[:40] * -2.5
        x[:, 256] = 1.0
    assert worst_share(x, ggml_type) <= BOUND[ggml_type.name]


@EACH_TYPE
def test_zeros_stay_zeros(ggml_type):
    x = torch.zeros((2, 256))
    assert torch.equal(decode_rows(encode_rows(x, ggml_type), ggml_type), x)


@settings(deadline=None, max_examples=60)
@given(
    ggml_type=st.sampled_from(list(ENCODERS)),
    scale=st.floats(1e-2, 1e3),
    shape=st.lists(st.integers(1, 3), max_size=2),
    seed=st.integers(0, 1000),
)
def test_any_scale_and_shape(ggml_type, scale, shape, seed):
    x = torch.randn((*shape, 512), generator=torch.Generator().manual_seed(seed)) * scale
    raw = encode_rows(x, ggml_type)
    assert raw.shape == (*shape, row_bytes(ggml_type, 512))
    assert raw.dtype == torch.uint8
    assert worst_share(x, ggml_type) <= BOUND[ggml_type.name]


@EACH_TYPE
def test_strided_and_empty_input(ggml_type):
    x = torch.randn((512, 6), generator=torch.Generator().manual_seed(2)).t()[::2]
    assert torch.equal(encode_rows(x, ggml_type), encode_rows(x.contiguous(), ggml_type))
    assert encode_rows(torch.zeros((0, 512)), ggml_type).shape == (0, row_bytes(ggml_type, 512))


def test_what_decodes_exactly_encodes_exactly():
    for ggml_type in (GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q5_0):
        once = decode_rows(encode_rows(torch.randn(8, 512), ggml_type), ggml_type)
        assert (decode_rows(encode_rows(once, ggml_type), ggml_type) - once).abs().max() < 1e-2


def test_bad_input_is_refused():
    x = torch.zeros((2, 256))
    with pytest.raises(ValueError, match="no encoder for IQ2_S"):
        encode_rows(x, GGMLType.IQ2_S)
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        encode_rows(x.double(), GGMLType.Q8_0)
    with pytest.raises(ValueError, match="finite"):
        encode_rows(x / 0, GGMLType.Q8_0)
    with pytest.raises(ValueError, match="multiple of the Q4_K block"):
        encode_rows(x[:, :32], GGMLType.Q4_K)
