"""Who may use the API from a browser: the page of this deployment, and nobody else's.

Two checks. The Host header must be an address of this service, or a page anywhere could reach it under a name of its
own (DNS rebinding). An Origin, which browsers send with everything that could do harm, must be the page's.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config import Config
from pipeline.errors import ApiError, problem

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_METHODS = "GET, POST, PATCH, DELETE"
_MAX_JSON_BYTES = 1 * 2**20
_FORM_BYTES = 64 * 1024  # around an uploaded file: boundaries and part headers
_POLICY_VIOLATION = 1008


class Origins:
    """Decides which Host and Origin headers are acceptable."""

    def __init__(self, config: Config) -> None:
        self._ports = {config.ui.port, config.service.port}
        public = urlsplit(config.service.public_url or "")
        self._public_host = public.hostname
        self._hosts = {*_LOOPBACK, config.service.host.lower(), socket.gethostname().lower()}
        if public.hostname:
            self._hosts.add(public.hostname)

    def host_allowed(self, header: str) -> bool:
        """Whether a request for this host is meant for us. Numeric addresses always are: names can be made to lie."""
        host = _split(f"http://{header}").hostname or ""
        return host in self._hosts or _is_address(host)

    def origin_allowed(self, origin: str, host_header: str) -> bool:
        """Whether a page of this origin may use us: same machine, and the page's or our own port."""
        page = _split(origin)
        host = page.hostname or ""
        if page.scheme not in ("http", "https") or not host:
            return False
        if host == self._public_host:
            return True
        try:
            port = page.port or (443 if page.scheme == "https" else 80)
        except ValueError:
            return False
        ours = _split(f"http://{host_header}").hostname or ""
        return port in self._ports and (host == ours or (host in _LOOPBACK and ours in _LOOPBACK))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Gate:
    """ASGI middleware: host and origin checks, CORS for the page, and a bound on request bodies."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._origins = Origins(config)
        self._page_may_embed = config.service.public_url is not None
        self._limits = {
            "/uploads": config.service.max_upload_bytes + _FORM_BYTES,
            "/documents": config.chat.max_document_bytes + _FORM_BYTES,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        refusal = ""
        if not self._origins.host_allowed(host):
            refusal = f"host {host[:100]!r} is not this service's; use its address, or set service.public_url"
        elif origin is not None and not self._origins.origin_allowed(origin, host):
            refusal = f"origin {origin[:100]!r} may not use this service; only its own page may"
        if scope["type"] == "websocket":
            if refusal:
                await receive()
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal[:120]})
                return
            await self._app(scope, receive, send)
            return
        if refusal:
            await problem(403, refusal)(scope, receive, send)
            return
        respond = self._with_headers(send, origin)
        if scope["method"] == "OPTIONS" and origin is not None and "access-control-request-method" in headers:
            asked = headers.get("access-control-request-headers", "")
            preflight = [(b"access-control-allow-methods", _METHODS.encode()), (b"access-control-max-age", b"600")]
            preflight.append((b"access-control-allow-headers", asked.encode("latin-1")))
            await respond({"type": "http.response.start", "status": 204, "headers": preflight})
            await respond({"type": "http.response.body", "body": b""})
            return
        limit = self._limits.get(scope["path"].rstrip("/"), _MAX_JSON_BYTES)
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > limit:
            await problem(413, too_large(limit))(scope, receive, respond)
            return
        await _bounded(self._app, limit)(scope, receive, respond)

    def _with_headers(self, send: Send, origin: str | None) -> Send:
        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.append("vary", "origin")
                headers["x-content-type-options"] = "nosniff"
                headers["cross-origin-resource-policy"] = "cross-origin" if self._page_may_embed else "same-site"
                if origin is not None:
                    headers["access-control-allow-origin"] = origin
            await send(message)

        return respond


def too_large(limit_bytes: int) -> str:
    """What to say about a body beyond its bound."""
    return f"the request is too large, allowed: {limit_bytes / 2**20:,.1f} MB"


def _bounded(app: ASGIApp, limit_bytes: int) -> ASGIApp:
    """`app`, refusing a body that outgrows its bound without having declared its length."""

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        received = 0
        refused = False

        async def count() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit_bytes:
                raise ApiError(413, too_large(limit_bytes))
            return message

        async def answer(message: Message) -> None:
            # Whatever the framework makes of a body that broke off, the reason is this one.
            nonlocal refused
            if received <= limit_bytes:
                await send(message)
            elif not refused:
                refused = True
                await problem(413, too_large(limit_bytes))(scope, receive, send)

        await app(scope, count, answer)

    return bounded
