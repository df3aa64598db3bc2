"""The errors makeway raises on purpose.

Owns the three families of failure; never formats tracebacks or talks to a terminal.
Hazard: a message is the whole help a user gets, so it must say what, where, and what to do.
"""


class MakewayError(Exception):
    """Base of every error that makeway raises on purpose."""


class UserError(MakewayError):
    """The input (file, flag, request) cannot be used. One message: what, where, what to do."""


class OutOfPlan(UserError):
    """The memory plan does not fit; the message holds the table of what is too big and which flag helps."""


class EngineFailed(MakewayError):
    """One of our invariants broke; the engine is in phase `failed` until `rebuild()`."""
