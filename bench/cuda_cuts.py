"""How decode's launches are best cut: each matrix and layer of experts with every choice that may be good.

A choice's bits must be the rule's, which are checked against f64 first; down's sums may have another order. Hazard:
kernels are compiled in threads while others are timed; graphs are not disturbed by that.

    python -m bench.cuda_cuts [--within SECONDS] [--only NAME]      (one JSON line last)

A line is a matrix and a number of rows: what the rule chooses, then the best five (of so many); below it the rule's
choice without parts of the source (see EDITS). g groups of a block, t tiles one after the other, c of them fetched at
once, b buffers of sums, r blocks that registers leave room for; B blocks of an entry; p warps of an entry, a entries
at once.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cuda_kernels import DEVICE, LAYERS, Group
from bench.kernels import Layer, Step, error_of, time_us

from makeway.errors import EngineFailed
from makeway.gguf.types import GGMLType as G
from makeway.kernels.cuda import FOLDER, experts, linear
from makeway.kernels.cuda.compiler import Module, current_arch

GROUPS = (
    ("FN qkv, gate, alpha, beta", ((G.Q5_K, 10240), (G.Q4_K, 6144), (G.F32, 48), (G.F32, 48)), 2560),
    ("FN GDN out Q5_K", ((G.Q5_K, 2560),), 6144),
    ("FN router, shared", ((G.F32, 512), (G.F32, 1), (G.Q8_0, 640), (G.Q8_0, 640)), 2560),
    ("FN mixer down Q8_0", ((G.Q8_0, 320),), 10240),
    ("FN shared down Q8_0", ((G.Q8_0, 2560),), 640),
    ("FN q, k, v, indexer", ((G.Q4_K, 12288), (G.Q4_K, 512), (G.Q4_K, 512), (G.Q8_0, 128), (G.Q8_0, 512)), 2560),
    ("FN attention out Q8_0", ((G.Q8_0, 2560),), 6144),
    ("30B q, k, v", ((G.Q4_K, 4096), (G.Q4_K, 512), (G.Q4_K, 512)), 2048),
    ("30B attention out Q4_K", ((G.Q4_K, 2048),), 4096),
    ("30B router", ((G.F32, 128),), 2048),
    ("30B head Q6_K", ((G.Q6_K, 151936),), 2048),
    ("FN head Q6_K", ((G.Q6_K, 248320),), 2560),
)
ROWS = (1, 4, 8)
# Edits of kernels: file, what is there, what is put there instead. Without a part a kernel is wrong, but shows what the
# part costs.
COPY = "if (16 * (piece + lane % 2) < wanted) copy16_async(to + 16 * piece, from + 16 * piece);"
PREFETCH = "for (int at = 0; at < HALF; at += 32) prefetch32(half + at);"
ROWS_OF_X = "for (int row = first; row < n; row += step) {"
HIDDEN = "for (int i = thread_x(); i < count * ROWS; i += UNITS * LANES) {"
EDITS = {
    "-product": [("product.cuh", "        multiply<KIND, UK, SETS>(total, blocks[0], blocks[1], x);\n", "")],
    "-fetch": [("product.cuh", COPY, ";"), ("product.cuh", PREFETCH, PREFETCH.replace("at < HALF", "at < 0"))],
    "-x": [("product.cuh", ROWS_OF_X, ROWS_OF_X.replace("row = first", "row = n"))],
    "-sums": [
        ("linear.cu", "        finish_tile<N, SETS>(sums, m, split, tile);\n", ""),
        ("experts.cu", HIDDEN, HIDDEN.replace("count * ROWS", "0")),
    ],
}


class Compiled:
    """In the place of `Programs`: kernels compiled in threads from when they are wanted."""

    def __init__(self, pool: ThreadPoolExecutor, *, edits: str = "") -> None:
        """`edits`: a name in EDITS."""
        self._pool, self._folder = pool, edited(edits) if edits else None
        self._coming: dict[tuple[Path, str], Future] = {}
        self._loaded: dict[tuple[Path, str], object] = {}

    def want(self, source: Path, name: str) -> None:
        if (source, name) not in self._coming:
            file = source if self._folder is None else self._folder / source.name
            self._coming[source, name] = self._pool.submit(Module.compile, [file], [name], current_arch())

    def spills(self, source: Path, name: str) -> bool:
        return self._coming[source, name].result().resources[name].spill_bytes > 0

    def kernel(self, source: Path, name: str, parameters: str) -> object:
        if (source, name) not in self._loaded:
            self.want(source, name)
            module = self._coming[source, name].result()
            self._loaded[source, name] = module.kernel(name, parameters)
        return self._loaded[source, name]


def edited(name: str) -> Path:
    """A folder with the kernels' sources, after these edits."""
    folder = Path(tempfile.mkdtemp())
    for file in FOLDER.glob("*.cu*"):
        text = file.read_text()
        for of, old, new in EDITS[name]:
            assert of != file.name or text.count(old) == 1, (name, old)
            text = text.replace(old, new) if of == file.name else text
        (folder / file.name).write_text(text)
    return folder


class Only:
    """The kernels whose names begin so; others do nothing."""

    def __init__(self, programs: Compiled, begin: str) -> None:
        self._programs, self._begin = programs, begin

    def kernel(self, source: Path, name: str, parameters: str) -> object:
        return self._programs.kernel(source, name, parameters) if name.startswith(self._begin) else self

    def launch(self, *_: object, **__: object) -> None:
        pass


def fits(how: "linear.Cut | experts.Launches") -> bool:
    room = linear.MAX_SHARED_HOPPER + linear.RESERVED
    return how.resident * (how.shared_bytes + linear.RESERVED) <= room


def resident_choices(warps: int, *, sets: int) -> list[int]:
    """Blocks of a multiprocessor such that there are at most so many warps, whose registers are then 128 to 40."""
    return sorted({max(1, most // warps) for most in ((16, 24, 32, 48) if sets == 1 else (12, 16, 20, 24))})


def turn_choices(n_blocks: int, resident: int) -> list[int]:
    """Tiles of a block, of so many blocks with one: such that all run at once, or a half, or on half of the places."""
    waves = n_blocks / (linear.PROCESSORS * resident)
    some = {max(1, -int(-waves * by // 1)) for by in (0.25, 0.34, 0.5, 1.0, 2.0)} | {1, 2}
    return sorted(t for t in some if waves / t <= 12 and (t == 1 or n_blocks / t >= linear.PROCESSORS / 2))


def cuts_of(kinds: list[G], n_cols: int, rows: list[int], n: int) -> list[linear.Cut]:
    """Every choice that may be good; all give the same bits."""
    _, group_units, n_groups = linear.groups_of(kinds, n_cols)
    tiles = sum(-(-r // linear.TILE) for r in rows)
    found = []
    for groups in range(1, n_groups + 1):
        warps, splits = groups * group_units, -(-n_groups // groups)
        if warps > 32 or (groups < n_groups and splits == -(-n_groups // (groups - 1) if groups > 1 else 0)):
            continue
        for resident in resident_choices(warps, sets=linear.n_sets(n)):
            for turns in turn_choices(tiles * splits, resident):
                for copies in range(1, min(turns, 3) + 1):
                    for buffers in (2, 1):
                        options = {"groups": groups, "turns": turns, "buffers": buffers, "copies": copies}
                        how = linear.cut_as(kinds, n_cols, rows=rows, n=n, resident=resident, **options)
                        if fits(how) and how not in found:
                            found.append(how)
                            break  # one buffer only where there is no room for two
    return found


def label(how: linear.Cut) -> str:
    return f"g{how.groups}t{how.turns}c{how.copies}b{how.buffers}r{how.resident}"


class Session:
    """What is compiled, what was found, and until when."""

    def __init__(self, pool: ThreadPoolExecutor, end: float) -> None:
        self.pool, self.end = pool, end
        self.programs, self.edited = Compiled(pool), {name: Compiled(pool, edits=name) for name in EDITS}
        self.rows: list[dict] = []

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def show(self, row: dict, *, best: int = 5) -> None:
        self.rows.append(row)
        times = sorted(row["us"].items(), key=lambda item: item[1])
        text = "  ".join(f"{name} {us:.2f}" for name, us in times[:best])
        about = f"{row['name']:<26}{row['n']}  rule {row['rule']} {row['rule_us']:.2f}"
        print(f"{about} | {text}  ({len(times)})", flush=True)
        print("    " + "  ".join(f"{name} {us:.2f}" for name, us in row["edited"].items()), flush=True)
        if row["wrong"]:
            print(f"    WRONG: {' '.join(row['wrong'])}", flush=True)


def facts(matrices: tuple, n_cols: int) -> tuple[list[G], int, list[int]]:
    return [kind for kind, _ in matrices], n_cols, [rows for _, rows in matrices]


def want_group(session: Session, kinds: list[G], n_cols: int, rows: list[int]) -> None:
    for n in ROWS:
        hows = cuts_of(kinds, n_cols, rows, n)
        rule = linear.cut(kinds, n_cols, rows=rows, n=n, max_shared=linear.MAX_SHARED_HOPPER)
        for how in (rule, *hows):
            session.programs.want(linear.SOURCE, linear.kernel_name(kinds, how, prologue=linear.PLAIN, n=n))
        for programs in session.edited.values():
            programs.want(linear.SOURCE, linear.kernel_name(kinds, rule, prologue=linear.PLAIN, n=n))


def run_group(session: Session, name: str, matrices: tuple, n_cols: int) -> None:
    """All choices for 1, 4, 8 rows."""
    group = Group(matrices, n_cols)
    kinds, _, rows = facts(matrices, n_cols)
    x = torch.randn(8, n_cols, device=DEVICE)
    by_rule = linear.Linears(DEVICE, session.programs)
    outs = by_rule(x, group.copies[0])
    error = max(error_of(out, x, w) for out, w in zip(outs, group.copies[0], strict=True))
    for n in ROWS:
        some = x[:n]
        rule = linear.cut(kinds, n_cols, rows=rows, n=n, max_shared=linear.MAX_SHARED_HOPPER)
        row = {"name": name, "n": n, "bytes": group.n_bytes, "error": error, "rule": label(rule), "us": {}, "wrong": []}

        def measure(key: str, linears: linear.Linears, some: torch.Tensor = some, row: dict = row) -> float:
            same = linears(some, group.copies[0])
            is_right = error < 2e-5 and all(torch.equal(a, o[: len(some)]) for a, o in zip(same, outs, strict=True))
            if not is_right and not key.startswith("-"):
                row["wrong"].append(key)
            us, _ = time_us([functools.partial(linears, some, w) for w in group.copies], repeats=5)
            return us

        row["rule_us"] = measure("rule", by_rule)
        row["edited"] = {
            key: measure(key, linear.Linears(DEVICE, programs)) for key, programs in session.edited.items()
        }
        for how in cuts_of(kinds, n_cols, rows, n):
            kernel = linear.kernel_name(kinds, how, prologue=linear.PLAIN, n=n)
            if session.is_over or session.programs.spills(linear.SOURCE, kernel):
                continue
            linears = linear.Linears(DEVICE, session.programs, rule=lambda *_, how=how, **__: how)
            try:
                row["us"][label(how)] = measure(label(how), linears)
            except EngineFailed as refused:
                row["wrong"].append(f"{label(how)} ({refused})")
        session.show(row)


def gate_up_cuts(layout: experts.ExpertLayout, n: int, top_k: int) -> list[experts.Launches]:
    rule = experts.launches(layout, n=n, top_k=top_k, max_shared=linear.MAX_SHARED_HOPPER)
    tiles, found = layout.width // linear.TILE, []
    for resident in resident_choices(rule.units, sets=1):
        for blocks in sorted({-(-tiles // t) for t in (1, 2, 3, 4, 5, 7, 10, 14, 20, 40)}):
            for buffers in (2, 1):
                how = experts.launches_as(
                    layout, n=n, blocks=blocks, per_entry=rule.per_entry, at_once=rule.at_once, buffers=buffers,
                    resident=resident, down_copies=rule.down_copies, down_resident=rule.down_resident,
                )  # fmt: skip
                if fits(how) and how not in found and blocks * min(n * top_k, 64) >= linear.PROCESSORS / 2:
                    found.append(how)
    return found


def down_cuts(layout: experts.ExpertLayout, n: int, top_k: int) -> list[experts.Launches]:
    """Also with other warps of an entry, which change the order of sums: one must do for all numbers of rows."""
    rule = experts.launches(layout, n=n, top_k=top_k, max_shared=linear.MAX_SHARED_HOPPER)
    found = []
    for per_entry in range(1, rule.down_units + 1):
        for at_once in (a for a in (3, 4, 5, 6, 8, 10, 12, 16, 20, 24) if a <= min(n * top_k, 24 // per_entry)):
            of_warp = -(-rule.down_units // per_entry)
            for copies in sorted({1, 2, 2 * of_warp}):
                for resident in resident_choices(per_entry * at_once, sets=1):
                    how = experts.launches_as(
                        layout, n=n, blocks=rule.blocks, per_entry=per_entry, at_once=at_once, buffers=rule.buffers,
                        resident=rule.resident, down_copies=copies, down_resident=resident,
                    )  # fmt: skip
                    is_one = copies == 1 and (per_entry < rule.down_units or at_once < n * top_k)  # nothing on its way
                    room = how.down_shared_bytes <= linear.MAX_SHARED_HOPPER
                    has_threads = 32 * how.down_warps >= n * linear.TILE
                    few = at_once < 4 and n * top_k > 8
                    if room and has_threads and not few and not is_one and resident <= 3:
                        found.append(how)
    return found


def gate_up_label(how: experts.Launches) -> str:
    return f"B{how.blocks}b{how.buffers}r{how.resident}"


def down_label(how: experts.Launches) -> str:
    return f"p{how.per_entry}a{how.at_once}c{how.down_copies}r{how.down_resident}"


PARTS = (("gate_up", gate_up_cuts, gate_up_label), ("down", down_cuts, down_label))


def want_layer(session: Session, layout: experts.ExpertLayout, top_k: int) -> None:
    for n in ROWS:
        rule = experts.launches(layout, n=n, top_k=top_k, max_shared=linear.MAX_SHARED_HOPPER)
        for place, (_, cuts, _) in enumerate(PARTS):
            for how in (rule, *cuts(layout, n, top_k)):
                session.programs.want(experts.SOURCE, experts.kernel_names(layout, how)[place])
            for programs in session.edited.values():
                programs.want(experts.SOURCE, experts.kernel_names(layout, rule)[place])


class Steps:
    """Steps of a layer with n rows, and what the rule's launches make of the first."""

    def __init__(self, session: Session, layer: Layer, n: int) -> None:
        self.layer, self.steps = layer, [layer.step(n, 1.0) for _ in range(16)]
        for step in self.steps:
            step.x = torch.randn(n, layer.layout.hidden, device=DEVICE)
            step.plan()
        self.want = self.result(experts.StepExpertKernels(DEVICE, session.programs))
        expected = self.steps[0].expected() if n == 1 else self.want.double()
        self.error = float((self.want.double() - expected).norm() / expected.norm())

    def run(self, kernels: experts.StepExpertKernels, step: Step) -> None:
        kernels.run(step.buffers, step.x, self.layer.arena, layout=self.layer.layout, acc=step.acc)

    def result(self, kernels: experts.StepExpertKernels) -> torch.Tensor:
        self.steps[0].acc.zero_()
        self.run(kernels, self.steps[0])
        return self.steps[0].acc.clone()

    def measure(self, part: str, programs: Compiled, how: experts.Launches) -> tuple[float, bool]:
        """Microseconds of the launch whose kernel's name begins so, and whether both are right."""

        def rule(*_: object, **__: object) -> experts.Launches:
            return how

        got = self.result(experts.StepExpertKernels(DEVICE, programs, rule=rule))
        alone = experts.StepExpertKernels(DEVICE, Only(programs, part), rule=rule)
        us, _ = time_us([functools.partial(self.run, alone, step) for step in self.steps], repeats=5)
        return us, self.error < 1e-4 and float((got - self.want).norm() / self.want.norm()) < 1e-6


def run_layer(session: Session, name: str, layout: experts.ExpertLayout, n_experts: int, top_k: int) -> None:
    """Both launches, each alone."""
    layer = Layer(layout, n_experts, top_k)
    for n in ROWS:
        steps = Steps(session, layer, n)
        rule = experts.launches(layout, n=n, top_k=top_k, max_shared=linear.MAX_SHARED_HOPPER)
        for place, (part, cuts, of) in enumerate(PARTS):
            row = {"name": f"{name} {part}", "n": n, "error": steps.error, "rule": of(rule), "us": {}, "wrong": []}
            row["rule_us"], _ = steps.measure(part, session.programs, rule)
            row["edited"] = {key: steps.measure(part, programs, rule)[0] for key, programs in session.edited.items()}
            for how in cuts(layout, n, top_k):
                names = experts.kernel_names(layout, how)
                if session.is_over or session.programs.spills(experts.SOURCE, names[place]):
                    continue
                try:
                    row["us"][of(how)], right = steps.measure(part, session.programs, how)
                    row["wrong"] += [] if right else [of(how)]
                except EngineFailed as refused:
                    row["wrong"].append(f"{of(how)} ({refused})")
            session.show(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=float, default=95.0, help="seconds; what was not measured by then is left out")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    torch.manual_seed(0)
    with ThreadPoolExecutor(16) as pool:
        session = Session(pool, time.monotonic() + args.within)
        jobs = [
            (name, functools.partial(want_group, session, *facts(matrices, n_cols)),
             functools.partial(run_group, session, name, matrices, n_cols))
            for name, matrices, n_cols in GROUPS
        ]  # fmt: skip
        # Heads last: they take the longest, and matter least.
        jobs[-2:-2] = [
            (f"{name} experts", functools.partial(want_layer, session, layout, top_k),
             functools.partial(run_layer, session, f"{name} experts", layout, n_experts, top_k))
            for name, layout, n_experts, top_k in reversed(LAYERS)
        ]  # fmt: skip
        jobs = [job for job in jobs if args.only in job[0]]
        for _, want, _ in jobs:
            want()
        for _, _, measure in jobs:
            if not session.is_over:
                measure()
        pool.shutdown(cancel_futures=True)
    print(json.dumps({"bench": "cuda_cuts", "device": torch.cuda.get_device_name(), "rows": session.rows}))


if __name__ == "__main__":
    main()
