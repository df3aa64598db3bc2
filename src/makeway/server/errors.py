"""What a client is told when a request cannot be served, in OpenAI's form and in Anthropic's.

Owns status codes and the wording around them. Never shows a traceback or text of a prompt.
Hazard: clients retry on 429 and 5xx, so a fault of the request must be a 4xx that is not 429.
"""

from dataclasses import dataclass, field
from typing import Any

from makeway.errors import UserError

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """A refused request. `param`: the field at fault; `retry_after_s`: when trying again makes sense."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def openai(self) -> dict[str, Any]:
        """OpenAI's error document."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's error document."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.status == 503:
            kind = "overloaded_error"
        return {"type": "error", "error": {"type": kind, "message": self.message}}


@dataclass(frozen=True)
class Failure:
    """The end of a generation that broke off for a reason outside the request."""

    message: str
    code: str = "engine_failed"
    status: int = 503
    retry_after_s: int | None = field(default=5)

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, code=self.code, retry_after_s=self.retry_after_s)


def bad_request(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


def from_user_error(error: UserError, param: str | None = None) -> ApiError:
    """What the engine, the template or a grammar refused, as a 400."""
    return ApiError(400, str(error), param=param)


def context_exceeded(n_tokens: int, context: int, n_answer: int | None = None) -> ApiError:
    """OpenAI's `context_length_exceeded`."""
    asked = "" if n_answer is None else f" and {n_answer} tokens of answer were asked for"
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, your messages resulted in {n_tokens} "
        f"tokens{asked}; the context must hold both. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )
