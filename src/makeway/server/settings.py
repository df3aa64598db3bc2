"""Every setting of the server and its default; the flags of `makeway serve` are derived from here.

Owns the defaults. Never reads files or the environment. Hazard: a default written anywhere else is a bug.
"""

from dataclasses import dataclass

from makeway.errors import UserError


def _check(ok: bool, what: str, do: str) -> None:
    if not ok:
        raise UserError(f"{what}; {do}")


@dataclass(frozen=True)
class ServerConfig:
    """names: what clients may call the model, the first is what answers say. api_keys: none means open to everybody who
    reaches the port. max_waiting: requests that wait for a place, in all. max_body_mib: the largest request.
    cors_origins: web pages from these origins may call ("*": all). shutdown_s: how long requests may still run after
    SIGTERM. chat_template: the source of a template instead of the model's own. log_prompts: prompts go to the log.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 512
    max_body_mib: int = 32
    cors_origins: tuple[str, ...] = ()
    shutdown_s: float = 30.0
    restart_on_failure: bool = False
    chat_template: str | None = None
    log_prompts: bool = False

    def __post_init__(self) -> None:
        _check(bool(self.names) and all(self.names), "--name is empty", "give at least one character")
        _check(0 <= self.port < 65536, f"--port {self.port}", "use 0 (any free one) to 65535")
        _check(all(k and k.isascii() and k.isprintable() for k in self.api_keys), "--api-key", "use printable ASCII")
        _check(self.max_waiting >= 1, f"--max-waiting {self.max_waiting}", "use at least 1")
        _check(self.max_body_mib >= 1, f"--max-body-mib {self.max_body_mib}", "use at least 1")
        _check(self.shutdown_s >= 0, f"--shutdown-s {self.shutdown_s}", "use 0 or more")
