"""OpenAI's chat completions as data: requests read and refused, replies as one object or as a stream, errors.

Owns no socket and no session. What belongs to the run is not the client's to set: its sampling parameters are named in
a header and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raypost.chat.messages import read_messages
from raypost.chat.record import RecordedTurn, message_of

MODEL = "policy"
"""Name of the model that every session has."""
IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Parameters that belong to the run."""
IGNORED_HEADER = "x-raypost-ignored"


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        """`status`: of HTTP. `code`: by which clients tell errors apart."""
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for a reply."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...]
    max_tokens: int | None
    """None: as many as the run allows."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    """With the last piece of a stream."""
    return_token_ids: bool
    ignored: tuple[str, ...]
    """Parameters that are set and mean nothing."""


def read_request(body: Any) -> ChatRequest:
    """Return the request in a body. Raises ApiError."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body must be a JSON object")
    try:
        messages = read_messages(body.get("messages"))
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    if body.get("n") not in (None, 1):
        raise ApiError(
            400, f"n is {body['n']!r:.20}: a session gives one reply to a request; open more sessions"
        )
    form = body.get("response_format")
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise ApiError(
            400, "response_format is not supported: replies are sampled freely, for they are trained"
        )
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ()) if isinstance(stop, list | None) else None
    if stops is None or not all(isinstance(one, str) and one for one in stops):
        raise ApiError(400, f"stop is {stop!r:.80}: it must be a text, or a list of texts")
    return ChatRequest(
        messages=messages,
        tools=_tools(body.get("tools")) if body.get("tool_choice") != "none" else (),
        max_tokens=_max_tokens(body),
        stop=stops,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    value = body.get("max_completion_tokens", body.get("max_tokens"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ApiError(400, f"max_tokens is {value!r:.20}: it must be a number of at least 1")
    return value


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise ApiError(400, f"tools is {tools!r:.40}: it must be a list")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(
                400, f"tools has {tool!r:.80}: a tool is {{type: function, function: {{name, ...}}}}"
            )
    return tuple(tools)


def completion(turn: RecordedTurn, *, sent: list[int] | None) -> dict[str, Any]:
    """Return a reply as one object. `sent`: ids of the prompt, where ids are asked for."""
    message = message_of(turn)
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else turn.finish_reason,
        "logprobs": None,
    }
    of_prompt, said = turn.num_before, turn.num_ids
    found: dict[str, Any] = {
        "id": turn.completion_id,
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": of_prompt,
            "completion_tokens": said,
            "total_tokens": of_prompt + said,
        },
    }
    if sent is not None:
        choice["token_ids"], found["prompt_token_ids"] = turn.ids.tolist(), sent
    return found


def pieces(reply: Mapping[str, Any], *, include_usage: bool) -> Iterator[str]:
    """Yield a reply as the events of a stream."""
    (choice,) = reply["choices"]
    message = dict(choice["message"])
    calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", ()))]
    deltas: list[dict[str, Any]] = [message, *({"tool_calls": [call]} for call in calls)]
    of_all = {name: reply[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta in deltas:
        yield _event({**of_all, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield _event({**of_all, "choices": [end]})
    if include_usage:
        yield _event({**of_all, "choices": [], "usage": reply["usage"]})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
