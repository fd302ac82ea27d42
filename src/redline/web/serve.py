"""The web server: this package's static files, one WebSocket for messages, and an address to print.

/              the page
/NAME          style sheet and scripts, from a table built at the start: no paths are looked up
/socket        messages
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from redline.core.errors import UserError
from redline.web.hub import MAX_MESSAGE, Hub
from redline.web.security import Gate, is_loopback
from redline.web.static_files import static_files

PORT = 8750
_PORTS_TRIED = 40
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Page(Protocol):
    """A page and its state, which all viewers share."""

    html: str  # file of the page in `static`
    hub: Hub

    async def run(self) -> None:
        """Work in the background until cancelled."""

    def close(self) -> None:
        """Release all resources."""


def make_app(page: Page, host: str, port: int, token: str = "") -> ASGIApp:
    """Return the ASGI application of a page."""
    files = static_files()

    async def send_file(request: Request) -> Response:
        name = request.path_params.get("name", page.html)
        if name not in files:
            return Response("There is no such page.\n", status_code=404, media_type="text/plain")
        return Response(files[name], media_type=_TYPES[name[name.rindex(".") :]])

    async def messages(websocket: WebSocket) -> None:
        await page.hub.serve(websocket)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        del app
        task = asyncio.ensure_future(page.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            page.close()

    routes = [Route("/", send_file), Route("/{name}", send_file), WebSocketRoute("/socket", messages)]
    return Gate(Starlette(routes=routes, lifespan=lifespan), host, port, token)


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port, the first free one from 8750 on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failure: OSError | None = None
    for number in range(PORT, PORT + _PORTS_TRIED) if port is None else (port,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
        except (OSError, OverflowError) as error:
            listener.close()
            failure = error if isinstance(error, OSError) else OSError(str(error))
            if isinstance(error, socket.gaierror):
                break
            continue
        return listener
    reason = (failure.strerror if failure else "") or str(failure)
    place = f"port {port}" if port is not None else f"none of the ports {PORT} to {PORT + _PORTS_TRIED - 1}"
    raise UserError(f"The page cannot be served on {host}, {place}: {reason}. Name another with --port or --host.")


def serve(page: Page, host: str, port: int | None, say: Callable[[str], None]) -> None:
    """Serve a page until interrupted. say: called first, with the address."""
    listener = listen(host, port)
    number = listener.getsockname()[1]
    token = "" if is_loopback(host) else secrets.token_urlsafe(16)
    config = uvicorn.Config(
        make_app(page, host, number, token),
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        ws_max_size=MAX_MESSAGE,
        ws_max_queue=8,
        ws_per_message_deflate=False,
        limit_concurrency=64,
        timeout_graceful_shutdown=1,
        lifespan="on",
    )
    say(address(host, number, token))
    with listener, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def address(host: str, port: int, token: str) -> str:
    """Return the URL of the page."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
