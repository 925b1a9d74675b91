"""SessionServer: sessions over HTTP, on a port of this machine alone unless the configuration says otherwise.

Owns the socket and the keys that are known. What a request means is session.py's. A key is in no log and in no message;
one that is unknown, or whose session has ended, is told no more than that.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from raypost.agent_loop.session import Session, parse_body
from raypost.chat.openai import IGNORED_HEADER, MODEL, ApiError, pieces, read_request
from raypost.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
HOST = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


class SessionServer:
    """Serves the sessions that are added to it."""

    def __init__(self, host: str = HOST, port: int = 0, routes: Sequence[web.RouteDef] = ()) -> None:
        """Serve nothing yet. `port` 0: one that is free. `routes`: what else is served."""
        self._address = host, port
        self._routes = routes
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """For OpenAI's clients, once it has started."""

    async def start(self) -> None:
        """Begin to serve. Idempotent."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_routes(self._routes)
        app.router.add_post("/v1/responses", _other_api)
        app.router.add_post("/v1/messages", _messages_api)
        # A client that hangs up cancels its handler.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        host, port = self._address
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            raise ConfigError(f"agent_loop: sessions cannot be served at {host}:{port}: {error}") from error
        port = self._runner.addresses[0][1]
        # Where it listens everywhere, clients on other machines need a name of this one.
        self.base_url = f"http://{socket.gethostname() if host in EVERYWHERE else host}:{port}/v1"

    async def close(self) -> None:
        """End serving. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def add(self, session: Session) -> None:
        """Let the session's key in."""
        self._sessions[session.api_key] = session

    def remove(self, session: Session) -> None:
        """Let the session's key in no more."""
        self._sessions.pop(session.api_key, None)

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme == "Bearer" else None
        if session is None:
            raise ApiError(
                401, "the key opens no session: it is wrong, or its session has ended", "invalid_api_key"
            )
        return session

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except ApiError as error:
            return _refusal(error)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "raypost"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            try:
                body = await request.read()
            except web.HTTPRequestEntityTooLarge:
                raise ApiError(
                    413, f"the body has more than {MAX_BODY_BYTES} bytes", "request_too_large"
                ) from None
            asked = read_request(parse_body(body))
            reply = await session.answer(asked, body, _repeated(request))
        except ApiError as error:
            return _refusal(error)
        headers = {IGNORED_HEADER: ",".join(asked.ignored)} if asked.ignored else {}
        if not asked.stream:
            return web.json_response(reply, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces(reply, include_usage=asked.include_usage):
            await response.write(piece.encode())
        await response.write_eof()
        return response


def _repeated(request: web.Request) -> str | None:
    """Return by what a repeated request is known: its key, or "" for its body; None for a first one."""
    key = request.headers.get("Idempotency-Key")
    if key:
        return key
    return "" if request.headers.get("x-stainless-retry-count", "0") not in ("", "0") else None


def _refusal(error: ApiError) -> web.Response:
    # Clients repeat what is refused with 5xx by themselves: the session is of no use any more.
    headers = {"x-should-retry": "false"} if error.status >= 500 else {}
    return web.json_response(error.body, status=error.status, headers=headers)


async def _other_api(request: web.Request) -> web.Response:
    text = "responses are not served: use chat completions (openai-agents: set_default_openai_api('chat_completions'))"
    return web.json_response(ApiError(501, text, "not_implemented").body, status=501)


async def _messages_api(request: web.Request) -> web.Response:
    text = "Anthropic's messages are not served: use OpenAI's chat completions"
    body: dict[str, Any] = {"type": "error", "error": {"type": "not_implemented_error", "message": text}}
    return web.json_response(body, status=501)
