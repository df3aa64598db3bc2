"""Which drafts stand: those that are what the model itself would have said.

Owns the rule. Never samples by itself and never touches memory. Hazard: rows must be looked at in order and only up to
the first that differs, because each choice depends on the tokens before it (penalties, grammar, stop strings).

The rule. Row 0 of a verify step is the last token chosen, row i the draft i - 1, and the logits of row i are those
after it. The token of each place is drawn as it would be without drafts: from the target's distribution p there, with
a random number that depends on nothing but (seed, position). A draft stands when it equals that token.

Why it is right. Without drafts, place t gets x_t = F(p(. | x_<t), u(seed, t)). By induction over the places of a step:
as long as all drafts before t stood, the row's logits are p(. | x_<t) with the very same x_<t (and the same bits, as
no row's bits depend on the others), so the token drawn there is x_t itself. At the first draft that differs the drawn
token is still x_t, and the rows behind it, which followed another text, are dropped. So the text is equal token for
token, not only in distribution. It is also the rejection rule of speculative sampling (accept x with min(1, p(x) /
q(x)), else draw from the normalised rest of max(0, p - q)) for a drafter that is sure of its draft d, so that q(d) =
1: d is accepted with p(d), and else the token is drawn from p without d, which is what "draw from p and compare with
d" does.
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def verify(drafts: Sequence[int], rows: Tensor, choose: Callable[[Tensor], int | None]) -> int:
    """How many of the rows stand: 1 to 1 + len(drafts).

    rows: logits f32 [1 + len(drafts), vocab]. `choose` takes a row, makes its token the next of the text and returns
    it; None when the text ends there.
    """
    assert len(rows) == 1 + len(drafts)
    for i, draft in enumerate(drafts):
        if choose(rows[i]) != draft:
            return i + 1
    choose(rows[-1])
    return len(rows)
