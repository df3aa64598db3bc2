"""What the routed experts of one layer get from the model.

Owns nothing; never says where an expert is. Hazard: `acc` is changed in place.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class RoutedInput:
    """Input of the routed experts, and `acc`, to which their weighted sum is added.

    x f32 [n, hidden]; ids int64 [n, top_k], best first; weights f32 [n, top_k]; acc f32 [n, hidden] (holds the shared
    expert's output); inject f32 [n, streams] where the residual has streams.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    acc: Tensor
    inject: Tensor | None = None
