"""Shared fixtures: where golden files are, and one-line ways to run a model on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "golden"


def golden_path(name: str) -> Path:
    """A golden file: from tests/data, else from the shared folder; the test is skipped where neither holds it."""
    for folder in (DATA, SHARED):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is not in tests/data and the shared golden folder is absent")


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden .npz, read and closed."""
    with np.load(golden_path(name)) as file:
        return dict(file)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small matrices are slower on several threads, and the machine is shared."""
    torch.set_num_threads(1)
