"""From the sampling fields of a request to `SamplingParams`.

Owns the API's names, ranges and defaults (OpenAI's: temperature 1). Never chooses tokens.
Hazard: a range here must lie inside what `SamplingParams` accepts, so that every fault is a 400 with the field's name.
"""

from dataclasses import replace

from makeway.config import SamplingParams
from makeway.server.errors import bad_request
from makeway.server.fields import Fields

MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31
LEAST_TEMPERATURE = 1e-6  # below, dividing by it could overflow


def read_sampling(fields: Fields, *, n_vocab: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling of a request in OpenAI's fields and their usual extensions (top_k, min_p, ...).

    `max_tokens` and `logprobs` are given by the caller, because their fields differ by endpoint.
    Raises ApiError (400) naming the field.
    """
    temperature = fields.number("temperature", default=1.0, least=0.0, most=100.0)
    if 0.0 < temperature < LEAST_TEMPERATURE:
        name = fields.name("temperature")
        raise bad_request(f"'{name}' is {temperature}; use 0 (greedy) or at least {LEAST_TEMPERATURE}", name)
    seed = fields.integer("seed", least=-(2**63), most=2**64 - 1)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=max(0, fields.integer("top_k", least=-1, most=2**31) or 0),
        # 0 keeps the best token alone, which any share does that is small enough.
        top_p=max(1e-9, fields.number("top_p", default=1.0, least=0.0, most=1.0)),
        min_p=fields.number("min_p", default=0.0, least=0.0, most=1.0),
        typical_p=max(1e-9, fields.number("typical_p", default=1.0, least=0.0, most=1.0)),
        repetition_penalty=fields.number("repetition_penalty", default=1.0, least=0.01, most=100.0),
        presence_penalty=fields.number("presence_penalty", default=0.0, least=-2.0, most=2.0),
        frequency_penalty=fields.number("frequency_penalty", default=0.0, least=-2.0, most=2.0),
        logit_bias=_logit_bias(fields, n_vocab),
        seed=None if seed is None else seed % 2**64,
        stop=read_stop(fields, "stop"),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
    )


def choice_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of the `index`-th of several answers to one prompt: seeds count up, so that answers differ."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**64)


def read_stop(fields: Fields, field: str) -> tuple[str, ...]:
    """Stop strings, given as one text or a list."""
    value = fields.get(field)
    stops = [value] if isinstance(value, str) else fields.array(field) or []
    name = fields.name(field)
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'{name}' has {len(stops)} entries; give at most {MAX_STOPS}", name)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise bad_request(f"'{name}' must hold texts of at least one character", name)
        if len(stop) > MAX_STOP_LENGTH:
            raise bad_request(f"'{name}' holds a text of {len(stop)} characters; use at most {MAX_STOP_LENGTH}", name)
    return tuple(stops)


def _logit_bias(fields: Fields, n_vocab: int) -> dict[int, float]:
    given = fields.object("logit_bias")
    if given is None:
        return {}
    bias = {}
    for key in fields.plain("logit_bias") or {}:
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < n_vocab):
            name = given.name(key[:40])
            raise bad_request(f"'{name}': keys are token ids from 0 to {n_vocab - 1}", name)
        bias[int(key)] = given.number(key, default=0.0, least=-100.0, most=100.0)
    return bias
