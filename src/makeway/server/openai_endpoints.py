"""The endpoints of OpenAI's interface.

Owns the order in which a request is read, tokenised, queued and answered. Never holds state of its own.
Hazard: everything that can be refused must be refused before the first byte of a stream.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from makeway.server.chat import ChatAnswer
from makeway.server.completions import CompletionAnswer
from makeway.server.errors import bad_request
from makeway.server.openai_requests import read_chat, read_completion
from makeway.server.respond import Json
from makeway.server.service import Service


class OpenAiEndpoints:
    """Bound to one service; `routes` is what it offers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_s = int(time.time())

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._model(name) for name in self._service.config.names]})

    async def model(self, request: Request) -> Response:
        return Json(self._model(self._service.model(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        service = self._service
        body = await service.body(request)
        ready = service.loop.need_ready()
        asked = read_completion(body, n_vocab=ready.tokenizer.n_tokens)
        model = service.model(asked.model)
        prompts = await service.in_worker(request, lambda: service.completion_prompts(ready, asked))
        answer = CompletionAnswer(asked, ready.tokenizer, model=model, prompts=[p.tokens for p in prompts])
        return await service.answer(request, prompts, form=answer, stream=asked.delivery.stream)

    async def chat(self, request: Request) -> Response:
        service = self._service
        body = await service.body(request)
        ready = service.loop.need_ready()
        asked = read_chat(body, n_vocab=ready.tokenizer.n_tokens)
        model = service.model(asked.model)
        prompt = await service.in_worker(request, lambda: service.chat_prompt(ready, asked))
        answer = ChatAnswer(
            asked, ready.tokenizer, model=model, n_prompt=len(prompt.asked.tokens), outputs=prompt.outputs
        )
        return await service.answer(request, [prompt.asked], form=answer, stream=asked.delivery.stream)

    async def embeddings(self, request: Request) -> Response:
        raise bad_request(
            "this server makes no embeddings: it runs a generating model whose hidden states are not offered; "
            "use an embedding model elsewhere",
            code="unsupported_endpoint",
        )

    def _model(self, name: str) -> dict[str, Any]:
        ready = self._service.loop.ready
        document: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "makeway",
        }
        return document if ready is None else {**document, "max_model_len": ready.context}
