"""One generation as the server sees it: a prompt, how to continue it, and where its events go.

Owns the link between a client's answer and the engine's request. Never holds text of the answer.
Hazard: `request_id` belongs to the engine thread, the rest does not change.
"""

import time
from dataclasses import dataclass, field

from makeway.config import SamplingParams
from makeway.server.mailbox import Mailbox
from makeway.text.grammar import CompiledGrammar


@dataclass(eq=False)
class Ticket:
    """`client`: whose turn it takes; `index`: which answer of the HTTP request it is."""

    client: str
    tokens: list[int]
    sampling: SamplingParams
    mailbox: Mailbox
    index: int = 0
    grammar: CompiledGrammar | None = None
    request_id: int | None = None
    created_s: float = field(default_factory=time.monotonic)
