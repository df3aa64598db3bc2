"""What every HTTP request passes first: who may call, and how failures look.

Owns API keys, the check of web origins, and the last catch of exceptions. Never reads a body. Hazard: `scope["state"]`
tells endpoints which client it is; without this middleware nobody is checked.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from makeway.server.errors import ApiError
from makeway.server.metrics import Metrics
from makeway.server.respond import ClientLeft, Json

logger = logging.getLogger("makeway.server")

OPEN_PATHS = ("/health", "/", "/favicon.ico")  # a page must load before its user can enter a key
OPEN_PREFIX = "/static/"
_ID_HEADERS = (b"x-request-id", b"request-id")  # where OpenAI's and Anthropic's clients look


class Guard:
    """ASGI middleware; keys are compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], cors_origins: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._origins = frozenset(cors_origins)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = time.monotonic(), 0
        request_id = secrets.token_hex(8)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(name, request_id.encode()) for name in _ID_HEADERS]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            scope.setdefault("state", {})["client"] = self._check(scope)
            await self._app(scope, receive, watched)
        except ClientLeft:
            status = 499
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, watched)
        except Exception:
            logger.exception("request %s to %s failed", request_id, scope["path"])
            if status:  # the answer has begun: the connection is cut, so that nobody takes it for a whole one
                raise
            mistake = ApiError(500, "the server made a mistake; its log says more")
            await error_response(scope["path"], mistake)(scope, receive, watched)
        finally:
            self._metrics.responded(status)
            took_ms = 1000 * (time.monotonic() - started_s)
            logger.info("%s %s %s %d %.0f ms", request_id, scope["method"], scope["path"], status, took_ms)

    def _check(self, scope: Scope) -> str:
        """The client's name for the fair queue; raises ApiError (401, 403)."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            same = urlsplit(origin).netloc == headers.get("host")
            if not same and origin not in self._origins and "*" not in self._origins:
                raise ApiError(403, "web pages of other origins may not call this server; see --cors-origin")
        client = scope.get("client")
        host = client[0] if client else "local"
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return host
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        if not any(matches):
            what = "is wrong" if given else "is missing; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, f"the API key {what}", code="invalid_api_key")
        return f"{matches.index(True)}@{host}"


def error_response(path: str, error: ApiError) -> Response:
    """An error in the form that the caller of this path expects."""
    body = error.anthropic() if path.startswith("/v1/messages") else error.openai()
    return Json(body, status_code=error.status, headers=error.headers)
