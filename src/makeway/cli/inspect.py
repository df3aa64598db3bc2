"""`makeway inspect`: what is in a GGUF file, by part and by type, and whether makeway can run it.

Owns the table. Never loads tensors. Hazard: it must also work on files that makeway cannot run.
"""

import json
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from makeway.cli import options as o
from makeway.gguf import GGUFFile, open_gguf
from makeway.models import ARCHITECTURES
from makeway.models.parts import PARTS, part_of
from makeway.quants import QUANT_TYPES

GIB = 1 << 30


def summary(file: GGUFFile) -> dict[str, Any]:
    """Everything the command prints, as plain data."""
    architecture = file.get_str("general.architecture", default="(none)")
    keys = {k: v for k, v in file.metadata.items() if k.startswith(f"{architecture}.")}
    n_blocks = file.get_int(f"{architecture}.block_count", default=1 << 31)
    first_draft = n_blocks - file.get_int(f"{architecture}.nextn_predict_layers", default=0)
    n_bytes: Counter[str] = Counter()
    types: dict[str, Counter[str]] = {}
    for tensor in file.tensors.values():
        part = part_of(tensor.name, first_draft_block=first_draft)
        n_bytes[part] += tensor.n_bytes
        types.setdefault(part, Counter())[tensor.type.name] += 1
    unsupported = [f"architecture {architecture}"] if architecture not in ARCHITECTURES else []
    unsupported += [f"{t.name}: type {t.type.name}" for t in file.tensors.values() if t.type not in QUANT_TYPES]
    shapes = {k.removeprefix(f"{architecture}."): _plain(v) for k, v in keys.items()}
    return {
        "files": [str(p) for p in file.paths],
        "file_bytes": file.n_bytes,
        "architecture": architecture,
        "name": file.get_str("general.name", default=""),
        "n_parameters": sum(t.n_elements for t in file.tensors.values()),
        "n_tensors": len(file.tensors),
        "shapes": shapes,
        "parts": {p: {"bytes": n_bytes[p], "types": dict(types[p])} for p in PARTS if p in types},
        "unsupported": unsupported,
    }


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def inspect_command(
    model: o.ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show architecture, shapes, bytes by part, types, and what is unsupported."""
    with open_gguf(model) as file:
        data = summary(file)
    if as_json:
        print(json.dumps(data, ensure_ascii=False))
        return
    console = Console(highlight=False)
    console.print(f"{data['architecture']}  {data['name']}", style="bold", markup=False)
    console.print(
        f"{data['n_parameters'] / 1e9:.3f} B parameters, {data['n_tensors']} tensors, "
        f"{data['file_bytes'] / GIB:.3f} GiB in {len(data['files'])} file(s)"
    )
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("part", "left"),
        ("MiB", "right"),
        ("share", "right"),
        ("tensors by type", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    total = max(1, sum(p["bytes"] for p in data["parts"].values()))
    for part, p in data["parts"].items():
        types = ", ".join(f"{t} x{n}" for t, n in sorted(p["types"].items()))
        table.add_row(part, f"{p['bytes'] / (1 << 20):,.2f}", f"{100 * p['bytes'] / total:.1f} %", types)
    console.print(table)
    for key, value in data["shapes"].items():
        text = str(value)
        console.print(f"  {key} = {text if len(text) <= 80 else text[:77] + '...'}", markup=False)
    if data["unsupported"]:
        console.print("unsupported:", style="bold red")
        for line in data["unsupported"]:
            console.print(f"  {line}", markup=False)
    else:
        console.print("everything in it is supported")
