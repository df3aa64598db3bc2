import io
import runpy
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants as gguf_quants

from makeway.quants.grids import even_sign_words, grid_words, look_up, sign_words

CPU = torch.device("cpu")
TOOL = Path(__file__).parent.parent.parent / "tools" / "make_iq_grids.py"
NAMES = ["iq1", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"]


def test_the_data_file_is_what_the_tool_writes():
    data = resources.files("makeway.quants").joinpath("grids.npz").read_bytes()
    made = runpy.run_path(str(TOOL))["grids"]()
    with np.load(io.BytesIO(data)) as stored:
        assert sorted(stored.files) == sorted(made) == sorted(NAMES)
        for name, grid in made.items():
            assert stored[name].dtype == np.int8
            assert np.array_equal(stored[name], grid)


@pytest.mark.parametrize("name", NAMES)
def test_a_word_holds_an_entry(name):
    data = resources.files("makeway.quants").joinpath("grids.npz").read_bytes()
    with np.load(io.BytesIO(data)) as stored:
        grid = stored[name]
    table = grid_words(name, CPU)
    assert table.shape == (len(grid),)
    assert np.array_equal(table.view(torch.int8).view(len(grid), -1).numpy(), grid)


def test_signs_follow_the_bits():
    signs = sign_words(CPU).view(torch.int8).view(256, 8)
    assert signs[0].tolist() == [1] * 8
    assert signs[0b10000101].tolist() == [-1, 1, -1, 1, 1, 1, 1, -1]


def test_the_eighth_sign_is_the_parity_of_the_published_table():
    published = torch.tensor(list(gguf_quants.IQ2_XXS.ksigns))
    assert torch.equal(even_sign_words(CPU), sign_words(CPU)[published])
    assert (even_sign_words(CPU).view(torch.int8).view(128, 8).prod(dim=1) == 1).all()


def test_look_up_takes_any_shape():
    table = torch.tensor([10, 20, 30])
    index = torch.tensor([[[0], [2]], [[1], [1]]], dtype=torch.int32)
    assert look_up(table, index).tolist() == [[[10], [30]], [[20], [20]]]
    assert look_up(table, index[:0]).shape == (0, 2, 1)
