"""The endpoints that are about the server itself: health, status, metrics, tokens.

Owns their documents. Never generates. Hazard: they answer while the model loads and after it failed.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from makeway.server.metrics import CONTENT_TYPE
from makeway.server.respond import Json
from makeway.server.service import Service, need_token_ids


class ServerEndpoints:
    """Bound to one service; `routes` is what it offers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/status", self.status),
            Route("/metrics", self.metrics),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """200 when requests are served, else 503; the document says why."""
        health = self._service.loop.health
        document: dict[str, Any] = {"status": health.state, "since_s": round(time.monotonic() - health.since_s, 3)}
        if health.state == "loading":
            document["loaded"] = round(health.loaded, 4)
        if health.reason:
            document["reason"] = health.reason
        if health.state == "ok":
            return Json(document)
        return Json(document, status_code=503, headers={"retry-after": "5"})

    async def status(self, request: Request) -> Response:
        return Json(self._service.document())

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.show(), media_type=None, headers={"content-type": CONTENT_TYPE})

    async def tokenize(self, request: Request) -> Response:
        """Token ids of `prompt` (or `content`)."""
        service = self._service
        body = await service.body(request)
        ready = service.loop.need_ready()
        field = "content" if body.get("prompt") is None and body.get("content") is not None else "prompt"
        text, add_special = body.need_text(field), body.flag("add_special_tokens", default=True)
        tokens = await service.in_worker(request, lambda: ready.tokenizer.encode(text, add_special=add_special))
        return Json({"tokens": tokens, "count": len(tokens), "max_model_len": ready.context})

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`."""
        service = self._service
        body = await service.body(request)
        ready = service.loop.need_ready()
        tokens = need_token_ids(body, "tokens")
        text = await service.in_worker(request, lambda: ready.tokenizer.decode(tokens))
        return Json({"prompt": text, "content": text})
