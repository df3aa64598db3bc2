"""makeway: an engine and server for Mixture-of-Experts models that are bigger than the GPU.

The public API: `Engine`, `EngineConfig`, `SamplingParams`, the events, and the errors.
"""

from makeway.config import EngineConfig, SamplingParams
from makeway.engine import DraftCounts, Engine, Event, Timings, TokenLogprobs
from makeway.errors import EngineFailed, MakewayError, OutOfPlan, UserError

__version__ = "0.1.0"

__all__ = [
    "DraftCounts",
    "Engine",
    "EngineConfig",
    "EngineFailed",
    "Event",
    "MakewayError",
    "OutOfPlan",
    "SamplingParams",
    "Timings",
    "TokenLogprobs",
    "UserError",
    "__version__",
]
