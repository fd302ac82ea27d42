"""Access control: checks of Host, Origin and token on every request, and security headers on every response.

On loopback, a request's Host must name this machine, so that a foreign page cannot reach the server under its own domain (DNS
rebinding). Otherwise it must also carry the token, which is part of the printed address and then kept in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`."""
    return host in _LOOPBACK


class Gate:
    """ASGI middleware that lets only permitted requests through."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str = "") -> None:
        """token: required in every request; empty: no token is required."""
        self.app, self.host, self.port, self.token = app, host, port, token
        self.cookie = f"redline-{port}"  # cookies are shared between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if reason := self._refusal(headers):
            await self._refuse(scope, receive, send, reason)
            return
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if self.token and scope["type"] == "http" and given and self._matches(given):
            answer = RedirectResponse(scope["path"], status_code=303, headers=HEADERS)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            await answer(scope, receive, send)
            return
        if self.token and not self._matches(self._cookie(headers)):
            await self._refuse(scope, receive, send, "This page needs the token of the printed address.")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in names)]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers) -> str:
        """Return why a request is refused because of its Host or Origin; empty if it is allowed."""
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._names_us(host):
            return "The Host of this request is not this server."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "This request comes from another page."
        return ""

    def _names_us(self, host: str) -> bool:
        """Return whether a Host header names this machine: by an IP address, or by one of its own names."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.netloc != host or parts.username is not None:
            return False
        if is_loopback(self.host):
            return name in _LOOPBACK
        try:
            ipaddress.ip_address(name)  # safe: only a domain name can be rebound to this machine
        except ValueError:
            return name in {self.host, socket.gethostname().lower(), *_LOOPBACK}
        return True

    def _cookie(self, headers: Headers) -> str:
        try:
            cookies = SimpleCookie(headers.get("cookie", "")[:4096])
        except CookieError:
            return ""
        return cookies[self.cookie].value if self.cookie in cookies else ""

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, reason: str) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": reason})  # before accepting: status 403
            return
        await PlainTextResponse(reason + "\n", status_code=403, headers=HEADERS)(scope, receive, send)
