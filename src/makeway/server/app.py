"""The ASGI application: routes, middleware, start and end.

Owns the composition. Never has logic of an endpoint. Hazard: the engine thread starts with the application's lifespan
and ends with it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from makeway.server.anthropic_endpoints import AnthropicEndpoints
from makeway.server.errors import ApiError
from makeway.server.guard import Guard, error_response
from makeway.server.loop import EngineLoop
from makeway.server.metrics import Metrics, StatusCollector
from makeway.server.openai_endpoints import OpenAiEndpoints
from makeway.server.page import page_routes
from makeway.server.served import Progress, ServedEngine
from makeway.server.server_endpoints import ServerEndpoints
from makeway.server.service import Service
from makeway.server.settings import ServerConfig


class Server:
    """`app` is the ASGI application, `loop` the engine's thread; `load` makes the engine, in that thread."""

    def __init__(self, config: ServerConfig, load: Callable[[Progress], ServedEngine]) -> None:
        self.config = config
        self.metrics = Metrics()
        self.loop = EngineLoop(load, max_waiting=config.max_waiting, restart_on_failure=config.restart_on_failure)
        self.service = Service(config, self.loop, self.metrics)
        self.metrics.registry.register(StatusCollector(self.service.document))
        middleware = [
            Middleware(Guard, api_keys=config.api_keys, cors_origins=config.cors_origins, metrics=self.metrics)
        ]
        if config.cors_origins:
            cors = Middleware(
                CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
            )
            middleware.insert(0, cors)
        self.app = Starlette(
            routes=[
                *ServerEndpoints(self.service).routes,
                *OpenAiEndpoints(self.service).routes,
                *AnthropicEndpoints(self.service).routes,
                *page_routes(),
            ],
            middleware=middleware,
            exception_handlers={HTTPException: _http_exception},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.loop.start()
        try:
            yield
        finally:
            await self.loop.stop(self.config.shutdown_s)
            self.service.close()


async def _http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the form of the other errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path[:200]}: {error.detail}"
    response = error_response(path, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response
