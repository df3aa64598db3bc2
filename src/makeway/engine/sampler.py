"""From logits to a token: penalties, filters, and a draw that depends on nothing but (seed, position).

Owns no state. Never uses a running random generator: the draw at a position is the same whatever was drawn before,
which is what lets speculation keep the text. Hazard: ties go to the lower token id everywhere.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from makeway.config import SamplingParams
from makeway.engine.request import TokenLogprobs
from makeway.errors import EngineFailed, UserError

Floats = NDArray[np.float64]
HEAD = 1024  # best tokens that nearly always decide a draw


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: Philox keyed by the seed, counted by the position."""
    bits = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def adjusted(
    logits: NDArray[np.float32], params: SamplingParams, *, seen: Sequence[int], counts: Mapping[int, int]
) -> Floats:
    """Logits [vocab] after penalties and bias, float64. `seen`: prompt and answer; `counts`: tokens of the answer."""
    out = logits.astype(np.float64)
    if params.repetition_penalty != 1.0 and seen:
        ids = np.unique(np.asarray(seen))
        values = out[ids]
        penalty = params.repetition_penalty
        out[ids] = np.where(values > 0, values / penalty, values * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = np.fromiter(counts.keys(), dtype=np.int64)
        n = np.fromiter(counts.values(), dtype=np.float64)
        out[ids] -= params.presence_penalty + params.frequency_penalty * n
    for token, bias in params.logit_bias.items():
        out[token] += bias
    return out


def probabilities(logits: Floats, params: SamplingParams) -> tuple[NDArray[np.int64], Floats]:
    """Token ids that may be drawn, best first, and their probabilities; temperature must be above 0.

    Filters in llama.cpp's order: top-k, typical, top-p, min-p, then temperature over what is left.
    """
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    p = _softmax(logits[order])
    if params.typical_p < 1.0:
        surprise = -np.log(np.maximum(p, 1e-300))
        distance = np.abs(surprise - float((p * surprise).sum()))
        by_distance = np.argsort(distance, kind="stable")
        n = int(np.searchsorted(np.cumsum(p[by_distance]), params.typical_p)) + 1
        keep = np.sort(by_distance[:n])
        order, p = order[keep], p[keep] / p[keep].sum()
    if params.top_p < 1.0:
        n = int(np.searchsorted(np.cumsum(p), params.top_p)) + 1
        order, p = order[:n], p[:n]
    if params.min_p > 0.0:
        keep = p >= params.min_p * p[0]
        order = order[keep]
    return order, _softmax(logits[order] / params.temperature)


def choose(
    logits: NDArray[np.float32],
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    seen: Sequence[int],
    counts: Mapping[int, int],
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token at `position` (its absolute place in the sequence); logits f32 [vocab].

    allowed: bool [vocab], the tokens a grammar lets through; the others cannot be chosen, whatever their bias.
    Raises EngineFailed when it allows none, UserError when `logit_bias` bans all it allows.
    """
    if params.temperature == 0.0 and allowed is None and not _adjusts(params):
        return int(np.argmax(logits))
    values = adjusted(logits, params, seen=seen, counts=counts)
    if allowed is not None:
        values = _only(values, allowed)
    if params.temperature == 0.0:
        return int(np.argmax(values))
    number = uniform(seed, position)
    drawn = _draw_from_head(values, params, number)
    return _draw(values, params, number) if drawn is None else drawn


def _adjusts(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias or params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _draw(values: Floats, params: SamplingParams, number: float) -> int:
    """The token at `number` of the distribution's running sum, best token first."""
    ids, p = probabilities(values, params)
    index = int(np.searchsorted(np.cumsum(p), number, side="right"))
    return int(ids[min(index, int(np.count_nonzero(p)) - 1)])  # the sum of p may end below 1; what is banned has p = 0


def _draw_from_head(values: Floats, params: SamplingParams, number: float) -> int | None:
    """The same token without sorting the vocabulary, or None when the best `HEAD` tokens do not decide it.

    Which way is taken depends on the arguments alone, so the draw at a position is one and the same for every drafter.
    """
    if params.typical_p < 1.0:
        return None
    n_head = min(params.top_k or HEAD, len(values))
    if n_head > HEAD:
        return None
    ids = _best(values, n_head)
    best = values[ids[0]]
    decides = bool(params.top_k) or n_head == len(values)  # the rest has no share
    if params.top_p < 1.0 or params.min_p > 0.0:
        rest = values[ids] if decides else values
        p = np.exp(values[ids] - best) / np.exp(rest - best).sum()
        if params.top_p < 1.0:
            n = int(np.searchsorted(np.cumsum(p), params.top_p)) + 1
            if n <= len(ids):
                ids, p, decides = ids[:n], p[:n], True
            elif not decides:
                return None
        if params.min_p > 0.0:
            keep = p >= params.min_p * p[0]
            if not decides and bool(keep[-1]):
                return None  # some of the others stay too
            ids, decides = ids[keep], True
    drawn_from = values[ids] if decides else values
    weights = np.exp((values[ids] - best) / params.temperature)
    sums = np.cumsum(weights / np.exp((drawn_from - best) / params.temperature).sum())
    index = int(np.searchsorted(sums, number, side="right"))
    if index < len(ids):
        return int(ids[index])
    return int(ids[int(np.count_nonzero(weights)) - 1]) if decides else None


def _best(values: Floats, n: int) -> NDArray[np.int64]:
    """The `n` best tokens, best first, equal ones by their id; 0 < n."""
    if n < len(values):
        near = np.flatnonzero(values >= _floor(values, n))
        least = np.partition(values[near], near.size - n)[near.size - n]
        above = near[values[near] > least]
        ids = np.sort(np.concatenate((above, near[values[near] == least][: n - above.size])))
    else:
        ids = np.arange(len(values))
    return np.asarray(ids[np.argsort(-values[ids], kind="stable")])


def _floor(values: Floats, n: int) -> np.float64:
    """A value that at least n < len(values) tokens reach, and not many more: the n-th largest of more than n stretches'
    largest. To search a whole vocabulary for it costs ten times as much."""
    size = max(1, len(values) // (8 * n))
    n_stretches = len(values) // size
    largest = values[: n_stretches * size].reshape(n_stretches, size).max(axis=1)
    return np.float64(np.partition(largest, n_stretches - n)[n_stretches - n])


def logprobs(logits: NDArray[np.float32], token: int, *, n_best: int) -> TokenLogprobs:
    """Log-probabilities of the model itself (no penalties, temperature 1)."""
    values = logits.astype(np.float64)
    values = values - (np.log(np.exp(values - values.max()).sum()) + values.max())
    best = _best(values, n_best) if n_best else ()
    return TokenLogprobs(float(values[token]), tuple((int(i), float(values[i])) for i in best))


def _only(values: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Values [vocab] with -inf where not allowed. Penalties and bias have touched each value alone, so it is the same
    as masking first, but an infinite bias cannot undo it."""
    if allowed.shape != values.shape:
        raise EngineFailed(f"a mask of {allowed.shape} does not fit logits of {values.shape}")
    if not allowed.any():
        raise EngineFailed("a mask allows no token; a grammar that is stuck must be refused before sampling")
    if values[allowed].max() == -np.inf:
        raise UserError("logit_bias bans every token that the grammar allows here; allow one of them")
    return np.where(allowed, values, -np.inf)


def _softmax(logits: Floats) -> Floats:
    p = np.exp(logits - logits.max())
    return np.asarray(p / p.sum())
