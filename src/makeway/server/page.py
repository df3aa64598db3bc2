"""The chat page: three static files that ship with the package.

Owns their headers. Never makes HTML. Hazard: the page must work offline, so it may load nothing from elsewhere.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


def page_routes() -> list[Route | Mount]:
    """The page at / and its files under /static."""
    return [Route("/", _page), Mount("/static", StaticFiles(directory=STATIC))]


async def _page(request: Request) -> Response:
    return FileResponse(
        STATIC / "index.html", headers={"content-security-policy": _POLICY, "cache-control": "no-cache"}
    )
