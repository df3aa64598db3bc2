"""The engine: requests, scheduling, sampling, and the loop that runs a model."""

from makeway.engine.engine import Engine
from makeway.engine.request import DraftCounts, Event, Request, Timings, TokenLogprobs

__all__ = ["DraftCounts", "Engine", "Event", "Request", "Timings", "TokenLogprobs"]
