"""External sessions: a program of the user's own opens, rewards and ends the sessions of a task, with an admin key.

Owns which sessions wait for such a program, and what it may do with them. Owns neither completions, which need the key
of a session (session_server.py), nor what a reward means (session_loop.py).

    a trajectory begins --> offered --POST /v1/sessions--> open --POST .../reward, .../end--> the trajectory goes on
                              +- closed before anybody came                +- an error: FAILED, by the program's words

Invariants: a session is opened once; the admin key completes nothing; no key is in a log or a message.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from raypost.agent_loop.session import Session, parse_body
from raypost.chat.openai import ApiError

MAX_WAIT_S = 60.0
"""Longest time that a program may wait for a session in one request; it asks again."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ExternalAgentError(Exception):
    """What the program said that went wrong."""


class ExternalSessions:
    """The sessions of one agent loop that a program outside plays."""

    def __init__(self) -> None:
        """Offer nothing yet."""
        self.admin_key = f"admin-{secrets.token_urlsafe(32)}"
        self._offered: dict[str, Session] = {}
        self._open: dict[str, tuple[Session, asyncio.Future[float | None]]] = {}
        self._came = asyncio.Condition()

    async def play(self, session: Session) -> float | None:
        """Offer a session, and return its reward once a program has ended it. Raises ExternalAgentError."""
        name, ended = secrets.token_urlsafe(12), asyncio.get_running_loop().create_future()
        self._open[name] = session, ended
        try:
            async with self._came:
                self._offered[name] = session
                self._came.notify()
            found: float | None = await ended
            return found
        finally:
            self._offered.pop(name, None)
            self._open.pop(name, None)

    def is_open(self, session: Session) -> bool:
        """Return whether a program has opened this session."""
        return all(one is not session for one in self._offered.values())

    def write(self, path: Path, base_url: str) -> None:
        """Write where the sessions are, and the admin key, for the owner of the run alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"base_url": base_url, "admin_key": self.admin_key}, file)
        new.replace(path)

    # ---------------------------------------------------------------- HTTP

    def routes(self) -> list[web.RouteDef]:
        """Return what is served."""
        return [
            web.post("/v1/sessions", self._guarded(self._post_open)),
            web.post("/v1/sessions/{name}/reward", self._guarded(self._post_reward)),
            web.post("/v1/sessions/{name}/end", self._guarded(self._post_end)),
        ]

    def _guarded(self, work: Callable[[web.Request, dict[str, Any]], Awaitable[web.Response]]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                scheme, _, key = request.headers.get("Authorization", "").partition(" ")
                if scheme != "Bearer" or not hmac.compare_digest(key.encode(), self.admin_key.encode()):
                    raise ApiError(401, "the key is not the admin key of these sessions", "invalid_api_key")
                try:
                    data = await request.read()
                except web.HTTPRequestEntityTooLarge:
                    raise ApiError(413, "the body is too large", "request_too_large") from None
                body = parse_body(data) if data.strip() else {}
                if not isinstance(body, dict):
                    raise ApiError(400, "the body must be a JSON object")
                return await work(request, body)
            except ApiError as error:
                return web.json_response(error.body, status=error.status)

        return handler

    async def _post_open(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        """Answer with a session that nobody has opened; 204 if none came in time."""
        wait_s = number_in(body, "wait_s", 0.0, MAX_WAIT_S) or 0.0
        try:
            async with asyncio.timeout(wait_s), self._came:
                await self._came.wait_for(lambda: bool(self._offered))
                name = next(iter(self._offered))
                session = self._offered.pop(name)
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response(
            {
                "id": name,
                "api_key": session.api_key,
                "base_url": session.base_url,
                "messages": session.messages,
                "metadata": session.metadata,
            }
        )

    async def _post_reward(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        """Give a completion, or the last one, its reward."""
        session, _ = self._named(request)
        reward, completion = number_in(body, "reward"), body.get("completion_id")
        if reward is None:
            raise ApiError(400, "reward is missing: give a number")
        try:
            if completion is None:
                session.set_last_reward(reward)
            else:
                session.set_reward(str(completion), reward)
        except KeyError as error:
            raise ApiError(404, str(error.args[0]), "not_found") from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return web.json_response({})

    async def _post_end(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        """End a session, with the reward of the whole, or with an error."""
        _, ended = self._named(request)
        reward, error = number_in(body, "reward"), body.get("error")
        if error is not None:
            ended.set_exception(ExternalAgentError(str(error)[:500]))
        else:
            ended.set_result(reward)
        return web.json_response({})

    def _named(self, request: web.Request) -> tuple[Session, asyncio.Future[float | None]]:
        name = request.match_info["name"]
        found = self._open.get(name)
        if found is None or name in self._offered or found[1].done():
            raise ApiError(
                404, "there is no open session with this id: it has ended, or was not opened", "not_found"
            )
        return found


def number_in(
    body: dict[str, Any], name: str, low: float = -math.inf, high: float = math.inf
) -> float | None:
    """Return a finite number of a body; None if it is not there. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ApiError(400, f"{name} is {value!r:.40}: it must be a finite number")
    if not low <= value <= high:
        raise ApiError(400, f"{name} is {value!r:.40}: it must lie between {low:g} and {high:g}")
    return float(value)
