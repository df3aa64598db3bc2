"""Writes `src/makeway/quants/grids.npz`: the codebooks of the IQ types, from the `gguf` package.

The codebooks are data of the file format (found by search, without a rule), so they are carried over as
numbers: int8 [entries, 8 or 4] each. The output is the same on every run. Run: python tools/make_iq_grids.py
"""

from pathlib import Path

import numpy as np
from gguf import quants

TARGET = Path(__file__).resolve().parent.parent / "src" / "makeway" / "quants" / "grids.npz"
SOURCES = {
    "iq1": quants.IQ1_S,  # IQ1_M has the same
    "iq2_xxs": quants.IQ2_XXS,
    "iq2_xs": quants.IQ2_XS,
    "iq2_s": quants.IQ2_S,
    "iq3_xxs": quants.IQ3_XXS,
    "iq3_s": quants.IQ3_S,
}


def grids() -> dict[str, np.ndarray]:
    """The codebooks by name, int8 [entries, values]."""
    found = {}
    for name, source in SOURCES.items():
        source.init_grid()
        found[name] = source.grid.reshape(source.grid_shape).astype(np.int8)
    return found


if __name__ == "__main__":
    np.savez_compressed(TARGET, **grids())
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
