"""The endpoints of Anthropic's interface.

Owns the order in which a request is read, rendered, queued and answered. Never holds state of its own.
Hazard: everything that can be refused must be refused before the first byte of a stream.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from makeway.server.anthropic import PING, AnthropicAnswer
from makeway.server.anthropic_requests import read_anthropic
from makeway.server.respond import Json
from makeway.server.service import Service


class AnthropicEndpoints:
    """Bound to one service; `routes` is what it offers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        service = self._service
        body = await service.body(request)
        ready = service.loop.need_ready()
        asked = read_anthropic(body, n_vocab=ready.tokenizer.n_tokens)
        model = service.model(asked.model)
        prompt = await service.in_worker(request, lambda: service.chat_prompt(ready, asked))
        answer = AnthropicAnswer(asked, model=model, n_prompt=len(prompt.asked.tokens), output=prompt.outputs[0])
        return await service.answer(request, [prompt.asked], form=answer, stream=asked.delivery.stream, keep_alive=PING)

    async def count_tokens(self, request: Request) -> Response:
        service = self._service
        body = await service.body(request)
        ready = service.loop.need_ready()
        asked = read_anthropic(body, n_vocab=ready.tokenizer.n_tokens, counting=True)
        service.model(asked.model)
        prompt = await service.in_worker(request, lambda: service.chat_prompt(ready, asked))
        return Json({"input_tokens": len(prompt.asked.tokens)})
