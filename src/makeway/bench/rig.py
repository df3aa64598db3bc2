"""An engine to be measured: opened on a synthetic model, fed prompts and answers whose tokens are known.

Owns what all benchmarks of an engine share: how it is set up, run to rest, and how bytes are counted. Never measures.
Hazard: prompts must differ and prefixes are not kept, or a prompt would cost nothing the second time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from makeway.bench.activity import Recorder, watched_backend, watched_device, watched_model
from makeway.bench.report import REFERENCE_NAME, Report
from makeway.bench.shapes import SHAPES, Qwen4ExpShape
from makeway.bench.specs import Shape
from makeway.bench.synth import in_memory, synthesize
from makeway.bench.topics import Knobs, token_stream
from makeway.config import EngineConfig, SamplingParams
from makeway.engine import Engine, Event
from makeway.engine.backend import open_backend
from makeway.engine.phases import Phase
from makeway.errors import EngineFailed, UserError
from makeway.memory.rates import Rates


@dataclass(frozen=True)
class Setup:
    """A model and an engine. `layers`, `ple_rows`: instead of the shape's own. `rates`: measured ones, for plan and
    bounds; None: the engine's defaults."""

    shape: str = "flash-next"
    layers: int | None = None
    ple_rows: int | None = None
    knobs: Knobs = field(default_factory=Knobs)
    config: EngineConfig = field(default_factory=EngineConfig)
    rates: Rates | None = None

    def model_shape(self) -> Shape:
        """Raises UserError for a shape or a change that is unknown."""
        if self.shape not in SHAPES:
            raise UserError(f"--shape {self.shape} is unknown; choose from {', '.join(SHAPES)}")
        shape = SHAPES[self.shape]
        changes = {"n_layers": self.layers, "ple_rows": self.ple_rows}
        if self.ple_rows is not None and not isinstance(shape, Qwen4ExpShape):
            raise UserError(f"--shape {self.shape} has no PLE; leave --ple-rows out")
        return replace(shape, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[type-var]


@dataclass(frozen=True)
class Counts:
    """Routed experts since the start: found in slots, and not; bytes of the former; misses guessed, and guessed right;
    mean bytes of an expert."""

    hits: int
    misses: int
    hit_bytes: int
    guesses: int
    right_guesses: int
    expert_bytes: float

    def since(self, before: "Counts") -> "Counts":
        return Counts(
            self.hits - before.hits,
            self.misses - before.misses,
            self.hit_bytes - before.hit_bytes,
            self.guesses - before.guesses,
            self.right_guesses - before.right_guesses,
            self.expert_bytes,
        )

    @property
    def miss_bytes(self) -> int:
        return round(self.misses * self.expert_bytes)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class Rig:
    """The engine and what feeds it."""

    def __init__(self, engine: Engine, setup: Setup, recorder: Recorder) -> None:
        self.engine, self.setup, self.recorder = engine, setup, recorder
        self.plan, self.swing = engine.plan, engine.memory.swing
        self.rates = setup.rates or engine.plan.rates
        self._n_streams = 0

    def tokens(self, n: int, *, topic_tokens: int = 50) -> list[int]:
        """A stream that no prompt before had."""
        self._n_streams += 1
        n_vocab = self.engine.model.facts.n_vocab
        seed = self.setup.knobs.seed * 10_000 + self._n_streams
        stream = token_stream(n, n_vocab=n_vocab, knobs=self.setup.knobs, topic_tokens=topic_tokens, seed=seed)
        return [int(t) for t in stream]

    def add(self, n_prompt: int, given: list[int]) -> int:
        """A request of a fresh prompt whose answer is `given`."""
        sampling = SamplingParams(max_tokens=len(given), ignore_eos=True)
        return self.engine.add(self.tokens(n_prompt), sampling, given=given)

    def ask(self, tokens: list[int]) -> int:
        """A request whose answer is its first token, as the model chooses it."""
        return self.engine.add(tokens, SamplingParams(max_tokens=1, ignore_eos=True))

    def step(self) -> list[Event]:
        """One step of the engine. Raises EngineFailed when it fails."""
        events = self.engine.step()
        if self.engine.phase is Phase.FAILED:
            raise EngineFailed(f"the engine failed: {'; '.join(e.text for e in events if e.kind == 'error')}")
        return events

    def rest(self) -> None:
        """Nothing runs and every expert that was on its way is back."""
        while self.engine.busy:
            self.step()

    def cancel(self, requests: list[int]) -> None:
        for request in requests:
            self.engine.cancel(request)
        self.rest()

    def counts(self) -> Counts:
        counters = self.swing.cache.counters
        layers = self.plan.layers
        mean = sum(layer.expert_bytes for layer in layers) / len(layers)
        return Counts(
            counters.hits,
            counters.misses,
            counters.served_bytes,
            counters.guesses,
            counters.right_guesses,
            mean,
        )

    def describe(self, report: Report) -> None:
        """What was measured, on what, by which kernels."""
        plan, config = self.plan, self.engine.config
        ran = self.recorder.kernels
        reference = sorted(name for name in ran if name.startswith(REFERENCE_NAME))
        report.kernels = {*ran, *((REFERENCE_NAME,) if reference else ())}
        report.facts["model"] = {
            "name": self.engine.model.facts.name,
            "shape": self.setup.shape,
            "layers": self.engine.model.facts.n_layers,
            "expert_bytes": self.engine.memory.store.nbytes,
            "knobs": vars(self.setup.knobs),
        }
        report.facts["plan"] = {
            "vram_bytes": plan.request.vram_bytes,
            "context": plan.request.context,
            "kv_type": plan.request.kv_type,
            "slots": plan.n_slots,
            "experts": plan.sizes.n_experts,
            "policy": config.policy,
            "max_sweep_tokens": plan.max_sweep_tokens,
            "lend_from_tokens": plan.lend_from_tokens,
            "copy_all_tokens": plan.copy_all_tokens,
        }
        report.facts["bound_rates"] = vars(self.rates)
        if self.engine.device.torch_device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(self.engine.device.torch_device)
            report.facts["vram_peak_bytes"] = peak
            report.remarks.append(
                f"memory reserved at the peak: {peak / (1 << 30):.2f} of {plan.request.vram_bytes / (1 << 30):.2f} GiB"
            )
        model, gib = report.facts["model"], 1 << 30
        report.remarks.append(
            f"{model['name']}: experts {model['expert_bytes'] / 1e9:.2f} GB, {plan.n_slots} of {plan.sizes.n_experts} "
            f"a layer in slots, {plan.request.vram_bytes / gib:.2f} GiB, context {plan.request.context}, "
            f"KV {plan.request.kv_type}"
        )
        whose = "measured" if self.setup.rates is not None else "the plan's defaults, not measured"
        report.remarks.append(
            f"rates of the bounds ({whose}): link {self.rates.link_bytes_per_s / 1e9:.1f} GB/s, device memory "
            f"{self.rates.hbm_bytes_per_s / 1e9:.0f} GB/s, products {self.rates.flops_per_s / 1e12:.4g} TFLOP/s"
        )
        if reference:
            report.remarks.append(f"reference kernels ran, which nobody tuned: {', '.join(reference)}")


@contextmanager
def opened(setup: Setup, report: Report | None = None) -> Iterator[Rig]:
    """The engine on the setup's model, closed at the end; then the report says what was measured, even when the
    measurement broke off. Raises UserError, OutOfPlan."""
    recorder = Recorder()
    with in_memory(synthesize(setup.model_shape(), setup.knobs)) as file:
        device = watched_device(setup.config, recorder)
        backend = watched_backend(open_backend(setup.config.kernels, device), recorder)
        with Engine(file, setup.config, device=device, backend=backend, rates=setup.rates) as engine:
            engine.memory.model = watched_model(engine.memory.model, recorder)
            rig = Rig(engine, setup, recorder)
            try:
                yield rig
            finally:
                if report is not None:
                    rig.describe(report)
