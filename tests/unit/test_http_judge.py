"""Judges that are services: a real one on loopback, which is slow, broken, rude and gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from raypost.config import JudgeConfig, load_config
from raypost.errors import ConfigError, JudgeError
from raypost.judges import service
from raypost.judges.task_judge import TaskJudge
from raypost.plan.plan import check
from raypost.types import Score
from tests.unit.reward_functions import state_of, task_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BACKOFF_S", 0.001)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def speaking(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that says these bytes, whatever it was asked: the last of them for ever. Yields URL and calls."""
    calls = list[int]()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            (length,) = [line for line in lines if line.startswith("content-length:")]
            await reader.readexactly(int(length.partition(":")[2]))
            writer.write(answers[min(len(calls), len(answers) - 1)])
            calls.append(1)
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score", calls
    finally:
        server.close()
        await server.wait_closed()


def answer(body: bytes, length: int | None = None, status: str = "200 OK") -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


async def judged(url: str, *responses: str, **options: Any) -> list[float]:
    judge = TaskJudge(
        task_of(JudgeConfig.model_validate({"kind": "http", "url": url, "timeout_s": 60, **options}))
    )
    try:
        return await judge.judge([state_of(response) for response in responses])
    finally:
        await judge.close()


async def test_a_group_is_one_request_with_all_that_a_function_would_see() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(body := await request.json())
        assert request.headers.get("Authorization") is None
        longest = max(len(one["response"]) for one in body["samples"])
        scores: list[Any] = [len(one["response"]) / longest for one in body["samples"]]
        scores[0] = {"reward": scores[0], "parts": {"length": 2}, "words": "short"}
        return web.json_response({"id": body["id"], "scores": scores})

    async with serving(handler) as url:
        first, second = await judged(url, "ab", "abcd")
    assert (first, second) == (0.5, 1.0)
    assert isinstance(first, Score) and (first.parts, first.words, first.retries) == (
        {"length": 2.0},
        "short",
        0,
    )
    (body,) = seen
    sample = body["samples"][0]
    assert sorted(sample) == ["answer", "metadata", "prompt", "response", "turns"]
    assert (sample["prompt"], sample["answer"], sample["metadata"]["level"]) == ("2 + 2?", "4", 3)


async def test_the_key_of_a_file_is_sent_and_stands_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("s3cret\n")

    async def handler(request: web.Request) -> web.Response:
        known = request.headers["Authorization"] == "Bearer s3cret"
        return web.json_response({"scores": [1]}) if known else web.Response(status=401, text="who are you")

    caplog.set_level(logging.DEBUG)
    async with serving(handler) as url:
        assert await judged(url, "a", api_key_file=tmp_path / "key") == [1.0]
        (tmp_path / "key").write_text("other")
        with pytest.raises(JudgeError, match="status 401: 'who are you'") as refused:
            await judged(url, "a", api_key_file=tmp_path / "key")
    assert "s3cret" not in caplog.text and "other" not in str(refused.value)
    (tmp_path / "config.yaml").write_text(
        "model: {name: tiny}\n"
        "tasks: [{source: {kind: reasoning_gym, dataset: chain_sum},"
        " judge: {kind: http, url: 'http://h/s', api_key_file: key}}]\n"
        "train: {num_steps: 1, batch_size: 2}\n"
    )
    config = load_config(tmp_path / "config.yaml")
    assert config.tasks[0].judge.api_key_file == tmp_path / "key"
    assert "other" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("rude", "text"),
    [
        (answer(b"oops", status="500 Internal Server Error"), "status 500: 'oops'"),
        (answer(b"later", status="429 Too Many Requests"), "status 429"),
        (answer(b"<html>login</html>"), "no JSON: '<html>login</html>'"),
        (answer(b'{"scores": [1', length=200), "gave no whole answer: ClientPayloadError"),
        (answer(b'{"scores": [1'), "no JSON"),
        (answer(b'{"scores": [1]}{"scores": [0]}'), "no JSON"),
        (b"", "gave no whole answer: ServerDisconnectedError"),
        (b"SSH-2.0-OpenSSH\r\n", "gave no whole answer"),
    ],
)
async def test_what_may_be_better_later_is_asked_again_and_then_failed(rude: bytes, text: str) -> None:
    async with speaking(rude, rude, answer(b'{"scores": [1]}')) as (url, calls):
        (score,) = await judged(url, "a", retries=2)
        assert isinstance(score, Score) and (score, score.retries, len(calls)) == (1.0, 2, 3)
    async with speaking(rude) as (url, calls):
        with pytest.raises(JudgeError) as failed:
            await judged(url, "a", retries=1)
        assert str(failed.value).startswith("judge: ") and text in str(failed.value)
        assert "asked 2 times" in str(failed.value) and len(calls) == 2


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (answer(b"no", status="404 Not Found"), "status 404: 'no'"),
        (answer(b"", status="302 Found"), "status 302"),
        (answer(b"[1.0]"), 'must be {"scores": [...]}'),
        (answer(b'{"scores": []}'), "0 scores for 1 responses"),
        (answer(b'{"scores": [NaN]}'), "nan: a score must be finite"),
        (answer(b'{"scores": [null]}'), "None, a NoneType: a score must be a number"),
        (answer(b'{"scores": ["1"]}'), "'1', a str: a score must be a number"),
        (answer(b'{"scores": [{"reward": 1, "part": {}}]}'), "it has reward, parts and words"),
        (answer(b'{"scores": [{"reward": 1, "parts": {"a": "b"}}]}'), "part 'a': 'b', a str"),
        (answer(b'{"id": "another", "scores": [1]}'), "answered request 'another'"),
    ],
)
async def test_what_will_not_be_better_is_failed_at_once(wrong: bytes, text: str) -> None:
    async with speaking(wrong) as (url, calls):
        with pytest.raises(JudgeError) as failed:
            await judged(url, "a")
        assert text in str(failed.value) and len(calls) == 1


async def test_a_second_answer_is_never_the_next_requests() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                (length,) = [line for line in head.split("\r\n") if line.startswith("content-length:")]
                await reader.readexactly(int(length.partition(":")[2]))
                writer.write(answer(b'{"scores": [1]}'))
                await asyncio.sleep(0.02)
                writer.write(answer(b'{"scores": [0]}'))
        except (OSError, EOFError):
            writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    judge = TaskJudge(task_of(JudgeConfig(kind="http", url=url)))
    for wait_s in (0.0, 0.05, 0.01):
        assert await judge.judge([state_of("a")]) == [1.0]
        await asyncio.sleep(wait_s)
    assert await judge.judge([state_of("a")]) == [1.0]
    await judge.close()
    server.close()
    await server.wait_closed()


async def test_one_that_is_slow_is_left_at_the_deadline_and_one_that_comes_back_is_asked_again() -> None:
    calls = list[int]()

    async def slow_once(request: web.Request) -> web.Response:
        calls.append(1)
        if len(calls) == 1:
            await asyncio.sleep(30)
        return web.json_response({"scores": [1.0]})

    async with serving(slow_once) as url:
        assert await judged(url, "a", timeout_s=0.5, retries=9) == [1.0]
    with pytest.raises(JudgeError, match="gave no whole answer: ClientConnectorError"):
        await judged(url, "a", retries=1)


async def test_no_more_requests_are_open_than_allowed() -> None:
    open_now, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return web.json_response({"scores": [1.0]})

    async with serving(handler) as url:
        judge = TaskJudge(task_of(JudgeConfig(kind="http", url=url, concurrency=2)))
        await asyncio.gather(*(judge.judge([state_of("a")]) for _ in range(8)))
        await judge.close()
    assert most == 2


async def test_metadata_that_is_no_json_is_named_and_numbers_of_numpy_are_numbers() -> None:
    async def handler(request: web.Request) -> web.Response:
        (sample,) = (await request.json())["samples"]
        return web.json_response({"scores": [sample["metadata"]["n"][0]]})

    async with serving(handler) as url:
        judge, state = TaskJudge(task_of(JudgeConfig(kind="http", url=url))), state_of("a")
        state.metadata = {**state.metadata, "n": np.asarray([3])}
        assert await judge.judge([state]) == [3.0]
        for value, text in ((b"x", "it holds a bytes"), (float("nan"), "JSON")):
            state.metadata = {**state.metadata, "n": value}
            with pytest.raises(JudgeError, match=text):
                await judge.judge([state])
        await judge.close()


@pytest.mark.parametrize(
    ("judge", "texts"),
    [
        ({"kind": "http"}, ["url is null", "address of a service"]),
        ({"kind": "http", "url": "judge:8000"}, ["'judge:8000' is no address", "http://HOST:PORT/PATH"]),
        ({"kind": "http", "url": "http://h:99999/"}, ["is no address", "Port"]),
        ({"kind": "http", "url": "http://user:pass@h/"}, ["user or password", "api_key_file"]),
        ({"kind": "http", "url": "http://h/", "retries": -1}, ["retries", "greater than or equal to 0"]),
        ({"kind": "exact", "url": "http://h/"}, ["url 'http://h/' is not used by kind 'exact'"]),
    ],
)
def test_a_service_that_cannot_be_one_is_refused(judge: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        JudgeConfig.model_validate(judge)
    assert all(text in str(refused.value) for text in texts)


async def test_a_plan_asks_the_service_and_offline_warns(tmp_path: Path) -> None:
    bodies = list[dict[str, Any]]()

    async def handler(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        return web.json_response({"scores": [0.5] * len(body["samples"])})

    def planned(url: str, offline: bool = False) -> tuple[str, ...]:
        (tmp_path / "config.yaml").write_text(
            f"name: x\nruns_dir: {tmp_path}\nmodel: {{name: tiny}}\n"
            "tasks: [{source: {kind: reasoning_gym, dataset: chain_sum}, max_prompt_tokens: 128,"
            f" judge: {{kind: http, url: {json.dumps(url)}}}}}]\n"
            "train: {num_steps: 4, batch_size: 8}\n"
        )
        return check(load_config(tmp_path / "config.yaml"), offline=offline).warnings

    async with serving(handler) as url:
        await asyncio.to_thread(planned, url)
        assert len(bodies) == 1 and len(bodies[0]["samples"]) == 6
    with pytest.raises(ConfigError, match=r"judge\.http: .*gave no whole answer"):
        await asyncio.to_thread(planned, url)
    warnings = await asyncio.to_thread(lambda: planned(url, offline=True))
    assert any(f"judge.url {url} was not asked" in warning for warning in warnings)
