"""`makeway bench`: one subcommand per measurement.

Owns their flags. Never measures (`makeway.bench`). Hazard: the last line of stdout is JSON, whatever is added.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from makeway.bench import decode, handover, llama
from makeway.bench.link import bench_link
from makeway.bench.picture import bench_picture
from makeway.bench.prefill import bench_prefill
from makeway.bench.report import Report
from makeway.bench.rig import Setup
from makeway.bench.shapes import SHAPES
from makeway.bench.topics import Knobs
from makeway.cli import options as o
from makeway.config import parse_bytes
from makeway.errors import MakewayError, UserError
from makeway.memory.rates import read_rates

ResultsOption = Annotated[
    Path, typer.Option("--results", help="Folder for the results, NAME-DATE.json; made where it is missing.")
]
RepeatsOption = Annotated[int, typer.Option("--repeats", help="Runs of each measurement, after the warm-up.")]
RESULTS = Path("bench", "results")


def _console() -> Console:
    """As wide as the terminal; wide enough for a table where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


@dataclass(frozen=True)
class _Common:
    setup: Setup
    results: Path
    allow_reference: bool

    def setup_for(self, *, context: int, parallel: int) -> Setup:
        """With as much context as is needed, unless it was chosen, and so many sequences."""
        config = self.setup.config
        return replace(self.setup, config=replace(config, context=config.context or context, parallel=parallel))


def _common(
    shape: Annotated[str, typer.Option("--shape", help=f"Synthetic model: {', '.join(SHAPES)}.")] = "flash-next",
    layers: Annotated[int | None, typer.Option("--layers", help="Instead of the shape's own number.")] = None,
    ple_rows: Annotated[int | None, typer.Option("--ple-rows", help="Rows of the n-gram table (Flash-Next).")] = None,
    skew: Annotated[float, typer.Option("--skew", help="Router rows are scaled by rank^-skew.")] = Knobs.skew,
    locality: Annotated[float, typer.Option("--locality", help="Likeness of a topic's tokens, 0 to 1.")] = (
        Knobs.locality
    ),
    topics: Annotated[int, typer.Option("--topics", help="Topics of the vocabulary.")] = Knobs.n_topics,
    rates: Annotated[
        Path | None, typer.Option("--rates", help="Measured rates for the bounds: a result of `makeway bench link`.")
    ] = None,
    allow_reference: Annotated[
        bool, typer.Option("--allow-reference", help="Show times although reference kernels ran.")
    ] = False,
    results: ResultsOption = RESULTS,
    device: o.DeviceOption = o.ENGINE["device"],
    kernels: o.KernelsOption = o.ENGINE["kernels"],
    vram: o.VramOption = o.ENGINE["vram"],
    context: o.ContextOption = o.ENGINE["context"],
    kv_type: o.KvTypeOption = o.ENGINE["kv_type"],
    slots: o.SlotsOption = o.ENGINE["slots"],
    policy: o.PolicyOption = o.ENGINE["policy"],
    uploads_per_layer: o.UploadsOption = o.ENGINE["uploads_per_layer"],
    guesses: o.GuessesOption = o.ENGINE["guesses"],
    chunk: o.ChunkOption = o.ENGINE["chunk"],
    sweep_tokens: o.SweepTokensOption = o.ENGINE["sweep_tokens"],
    handover_: Annotated[str, typer.Option("--handover", help="Lend slots to prompts: auto, never or always.")] = (
        o.ENGINE["handover"]
    ),
) -> _Common:
    """What all measurements of an engine take. Raises UserError."""
    config = o.engine_config(
        vram=vram,
        ram=None,
        prefix_ram="0",
        device=device,
        kernels=kernels,
        context=context,
        kv_type=kv_type,
        slots=slots,
        policy=policy,
        uploads_per_layer=uploads_per_layer,
        guesses=guesses,
        chunk=chunk,
        sweep_tokens=sweep_tokens,
        handover=handover_,
        drafter="none",
    )
    try:
        knobs = Knobs(skew, locality, topics)
    except ValueError as fault:
        raise UserError(f"--skew, --locality, --topics: {fault}") from fault
    setup = Setup(shape, layers, ple_rows, knobs, config, None if rates is None else read_rates(rates))
    return _Common(setup, results, allow_reference)


def measured(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command out of a function of (report, common, own options): it gets the shared options too, and its report is
    printed and written at the end, or as far as it went when the measurement breaks off."""

    def wrap(run: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(run).parameters.values())[2:]
        shared = list(inspect.signature(_common).parameters.values())

        def command(**given: Any) -> None:
            common = _common(**{p.name: given[p.name] for p in shared})
            arguments = ["bench", name, *_flags([*own, *shared], given)]
            report = Report(name, arguments, allow_reference=common.allow_reference)
            try:
                run(report, common, **{p.name: given[p.name] for p in own})
            except (KeyboardInterrupt, MakewayError, RuntimeError) as fault:
                if report.figures:
                    report.facts["broke_off"] = f"{type(fault).__name__}: {fault}"
                    report.remarks.append(f"INCOMPLETE, broke off ({report.facts['broke_off']})")
                    report.finish(common.results, _console())
                raise
            report.finish(common.results, _console())

        command.__doc__ = run.__doc__
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return wrap


def _flags(parameters: list[inspect.Parameter], given: dict[str, Any]) -> list[str]:
    """The command line that says the same, without what is the default."""
    flags: list[str] = []
    for p in parameters:
        value = given[p.name]
        if value == p.default:
            continue
        info = p.annotation.__metadata__[0]
        if isinstance(info, typer.models.ArgumentInfo):
            flags.append(str(value))
        elif value is True:
            flags.append(info.default)
        else:
            flags += [info.default, str(value)]
    return flags


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers of a list such as "1,2,4". Raises UserError."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as fault:
        raise UserError(f"{flag} {text}: use whole numbers with commas, such as 256,8192") from fault


def link_command(
    device: o.DeviceOption = o.ENGINE["device"],
    repeats: RepeatsOption = 7,
    host_memory: Annotated[str, typer.Option("--host-memory", help="Host memory to measure with.")] = "1GiB",
    results: ResultsOption = RESULTS,
) -> None:
    """Measure the link, memories and matrix units of this machine: rates for `makeway plan --rates`."""
    settings = {"--device": device, "--repeats": str(repeats), "--host-memory": host_memory}
    report = Report("link", ["bench", "link", *(part for setting in settings.items() for part in setting)])
    bench_link(report, device=device, repeats=repeats, host_bytes=parse_bytes(host_memory, "--host-memory"))
    report.finish(results, _console())


@measured("decode")
def decode_command(
    report: Report,
    common: _Common,
    rows: Annotated[str, typer.Option("--rows", help="Answers at once, one list.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option("--contexts", help="Tokens before the answer; all rows at the first.")] = (
        "256,8192"
    ),
    hits: Annotated[str, typer.Option("--hits", help="Hit rates to hold, in percent.")] = "100,85,50,0",
    steps: Annotated[int, typer.Option("--steps", help="Steps measured at a time.")] = decode.Lengths.steps,
    repeats: RepeatsOption = decode.Lengths.repeats,
    first: Annotated[int, typer.Option("--first", help="Steps after a prompt that are shown apart.")] = (
        decode.Lengths.first
    ),
    launches: Annotated[bool, typer.Option("--launches", help="Kernels of a step, by torch's profiler.")] = False,
) -> None:
    """Measure decode steps of a synthetic model beside their bound: rows, contexts, hit rates, first tokens."""
    row_counts, lengths_of = _numbers(rows, "--rows"), _numbers(contexts, "--contexts")
    rates = tuple(percent / 100 for percent in _numbers(hits, "--hits"))
    if not row_counts or not lengths_of:
        raise UserError("--rows, --contexts: give at least one number each")
    lengths = decode.Lengths(first=first, steps=steps, repeats=repeats)
    need = decode.needed_context(row_counts, lengths_of, lengths=lengths, levels=len(rates))
    setup = common.setup_for(context=need, parallel=max(row_counts))
    decode.bench_decode(
        report,
        setup,
        rows=row_counts,
        contexts=lengths_of,
        hit_rates=rates,
        lengths=lengths,
        shows_launches=launches,
    )


@measured("prefill")
def prefill_command(
    report: Report,
    common: _Common,
    lengths: Annotated[str, typer.Option("--lengths", help="Prompt tokens, one list.")] = "256,1024,8192",
    repeats: RepeatsOption = 3,
    arms_at: Annotated[str, typer.Option("--arms-at", help="Lengths at which other ways run too; '' for none.")] = (
        "8192"
    ),
    micro_batches: Annotated[str, typer.Option("--micro-batches", help="Tokens at once of those ways.")] = "512,2048",
) -> None:
    """Measure prompts of a synthetic model beside their bound, their parts, and other ways to read them."""
    tokens, arms = _numbers(lengths, "--lengths"), _numbers(arms_at, "--arms-at")
    setup = common.setup_for(context=max((*tokens, *arms, 1)) + 64, parallel=1)
    sizes = _numbers(micro_batches, "--micro-batches")
    bench_prefill(report, setup, lengths=tokens, repeats=repeats, arms_at=arms, micro_batches=sizes)


@measured("handover")
def handover_command(
    report: Report,
    common: _Common,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of the prompts that interrupt.")] = 8192,
    handovers: Annotated[int, typer.Option("--handovers", help="Prompts, after one that warms up.")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Steps measured before a prompt and late after it.")] = 64,
    first: Annotated[int, typer.Option("--first", help="Steps measured right behind a prompt.")] = 200,
) -> None:
    """Measure what prompts cost an answer that is under way: release, restore, refill, pause, decode rate."""
    need = handover.needed_context(prompt, n_handovers=handovers, steps=steps, first=first)
    setup = common.setup_for(context=need, parallel=2)
    handover.bench_handover(report, setup, n_tokens=prompt, n_handovers=handovers, steps=steps, first=first)


@measured("picture")
def picture_command(
    report: Report,
    common: _Common,
    out: Annotated[Path, typer.Argument(metavar="OUT.png", help="The picture.", show_default=False)],
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of the prompt.")] = 8192,
) -> None:
    """Draw what crosses the link and what is computed over one prompt (needs matplotlib)."""
    bench_picture(report, common.setup_for(context=prompt + 64, parallel=1), out, n_tokens=prompt)


def llama_command(
    model: Annotated[Path | None, typer.Option("--model", help="File that both ran: prints llama.cpp's lines.")] = None,
    cache: Annotated[str, typer.Option("--cache", help="GPU memory for llama.cpp's cache of experts.")] = "10GiB",
    llama_results: Annotated[
        list[Path] | None, typer.Option("--llama", help="What `llama-bench -o json` wrote; several times.")
    ] = None,
    own: Annotated[
        list[Path] | None, typer.Option("--own", help="Results of `bench decode` and `bench prefill`; several times.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--earlier", help=f"Numbers of llama.cpp {llama.BUILD} from an H200: a shape's name.")
    ] = None,
    results: ResultsOption = RESULTS,
) -> None:
    """Put results of llama.cpp and of makeway for the same file side by side, or print llama.cpp's commands."""
    if not (model or llama_results or own or shape):
        raise UserError("nothing to do: give --model for the commands, --llama and --own for the table, or --earlier")
    if model is not None:
        for line in llama.commands(model, cache_mib=parse_bytes(cache, "--cache") >> 20):
            print(line, file=sys.stdout if not (llama_results or own or shape) else sys.stderr)
        if not (llama_results or own or shape):
            return
    found = [("--llama", p) for p in llama_results or ()] + [("--own", p) for p in own or ()]
    report = Report("llama", ["bench", "llama", *(part for flag, path in found for part in (flag, str(path)))])
    if shape is not None:
        report.arguments = [*report.arguments, "--earlier", shape]
        report.figures += llama.earlier(shape)
        if not report.figures:
            raise UserError(f"--earlier {shape}: nothing was measured; choose qwen3-30b-a3b or flash-next")
    llama.side_by_side(report, llama_results or (), own or ())
    report.finish(results, _console())


COMMANDS: dict[str, Callable[..., None]] = {
    "link": link_command,
    "decode": decode_command,
    "prefill": prefill_command,
    "handover": handover_command,
    "picture": picture_command,
    "llama": llama_command,
}
"""By name, for the command line."""
