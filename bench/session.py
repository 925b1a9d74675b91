"""The session server: how many requests a second, and how long each takes, with a policy that answers at once.

    python -m bench.session [--requests 4000] [--turns 8] [--at-once 32] [--rounds 3]

The server works in this process, which has what actors have: uvloop, and few searches for garbage. Its client works in
another: a plain one, which writes HTTP onto sockets, and OpenAI's. Both also meet a stub, which reads the body and
answers with a constant. Rounds take turns, so that a busy machine slows all of them; in one a plain client begins
1,000 requests a second, in the others as many as are answered: there all open requests but one wait, so that each
takes a request's CPU time, the client's or the server's, whichever is longer, as many times as requests are open.
Prints one JSON object: requests a second and the 95th percentile of a request's milliseconds, each the median of the
rounds with their range, and what either client reaches against the session in shares of the stub.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from aiohttp import web

from actors.placement import GC_ALLOCATIONS
from bench.figures import Foreign, spread
from raypost.agent_loop.session import Session
from raypost.agent_loop.session_server import HOST, SessionServer
from raypost.chat.openai import MODEL
from raypost.chat.renderer import TemplateRenderer
from raypost.data.tokenizer import Tokenizer
from raypost.models.tiny import TinyRecipe, write_tokenizer
from raypost.types import GenerateResult, IntArray, SampleParams

TEMPLATE = Path(__file__).resolve().parents[1] / "jobs" / "recipes" / "tools.jinja"
ASKED = "State the final answer to the following arithmetic problem: 4 + 3 - 9 + 5 ="
STUB = {
    "id": "x", "object": "chat.completion", "created": 0, "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": " 7"}, "finish_reason": "stop"}],
}  # fmt: skip
TIMEOUT_S = 300.0

# ---------------------------------------------------------------- the client, a process of its own


async def play(job: dict[str, Any]) -> dict[str, float]:
    """Play every session of a job, so many at once; return requests a second and the 95th percentile, ms."""
    left, taken, begun = list(job["keys"]), list[float](), list[float]()
    chats = [await CLIENTS[job["client"]](job["url"]) for _ in range(job["at_once"])]

    async def plays(chat: Chat) -> None:
        while left:
            key, messages = left.pop(), [{"role": "user", "content": ASKED}]
            for _ in range(job["turns"]):
                if job["rate"]:
                    due = first_s + len(begun) / job["rate"]
                    begun.append(due)
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                start_s = time.perf_counter()
                said = await chat(key, messages)
                taken.append(time.perf_counter() - start_s)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ASKED}]

    first_s = time.perf_counter()
    await asyncio.gather(*map(plays, chats))
    spent_s = time.perf_counter() - first_s
    return {"requests_per_s": len(taken) / spent_s, "p95_ms": 1000 * float(np.percentile(taken, 95))}


Chat = Callable[[str, list[dict[str, Any]]], Awaitable[str]]


async def plain(url: str) -> Chat:
    """Return a client that does no more than it must."""
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def chat(key: str, messages: list[dict[str, Any]]) -> str:
        body = json.dumps({"model": MODEL, "messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        writer.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        found = await reader.readuntil(b"\r\n\r\n")
        length = int(found.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
        return str(reply["choices"][0]["message"]["content"])

    return chat


@functools.cache
def _openai() -> Any:
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")


async def official(url: str) -> Chat:
    """Return OpenAI's client."""

    async def chat(key: str, messages: list[dict[str, Any]]) -> str:
        client = _openai().with_options(base_url=url, api_key=key)
        reply = await client.chat.completions.create(model=MODEL, messages=messages)
        return str(reply.choices[0].message.content)

    return chat


CLIENTS = {"plain": plain, "openai": official}


# ---------------------------------------------------------------- the servers, in this process


class Sessions:
    """Makes sessions whose policy says " 7" at once."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for a tokenizer."""
        write_tokenizer(TinyRecipe(corpus="calls"), folder)
        self._tokenizer = Tokenizer.load(folder)
        self._renderer = TemplateRenderer(self._tokenizer, template=TEMPLATE.read_text())
        said = [*self._tokenizer.encode(" 7", add_special_tokens=False), self._tokenizer.eos_ids[0]]
        self._ids = np.asarray(said, np.int32)
        self.server = SessionServer()

    async def _generate(self, ids: IntArray, num_tokens: int, bound: int) -> GenerateResult:
        size = len(self._ids)
        return GenerateResult(
            response_ids=self._ids,
            logprobs=np.full(size, -0.5, np.float32),
            policy_versions=np.zeros(size, np.int32),
            finish_reason="stop",
            worker="w",
        )

    def make(self, max_turns: int) -> Session:
        """Return a session that is open."""
        session = Session(
            self._renderer,
            functools.partial(self._tokenizer.decode, skip_special_tokens=False),
            SampleParams(max_tokens=100_000, stop_token_ids=self._tokenizer.eos_ids),
            messages=[{"role": "user", "content": ASKED}],
            metadata={},
            base_url=self.server.base_url,
            max_prompt_tokens=1000,
            max_turns=max_turns,
        )
        self.server.add(session)
        session.run(self._generate)
        return session


async def _stub(request: web.Request) -> web.Response:
    json.loads(await request.read())
    return web.json_response(STUB)


async def _serve_stub() -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _stub)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    return runner, f"http://{HOST}:{runner.addresses[0][1]}/v1"


async def _played(job: dict[str, Any]) -> dict[str, float]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name if __spec__ else "bench.session", "--client",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(TIMEOUT_S):
        out, _ = await child.communicate(json.dumps(job).encode())
    found: dict[str, float] = json.loads(out)
    return found


async def measure(requests: int, turns: int, at_once: int, rounds: int) -> dict[str, Any]:
    """Return what is printed."""
    figures: dict[str, dict[str, list[float]]] = {}
    others, (runner, stub_url) = Foreign(), await _serve_stub()
    with tempfile.TemporaryDirectory() as folder:
        made = Sessions(Path(folder))
        await made.server.start()
        gc.set_threshold(GC_ALLOCATIONS)
        gc.freeze()
        for _ in range(rounds):
            for name, client, url, rate in (
                ("plain_stub", "plain", stub_url, None),
                ("plain_session", "plain", made.server.base_url, None),
                ("plain_session_1000_per_s", "plain", made.server.base_url, 1000.0),
                ("openai_stub", "openai", stub_url, None),
                ("openai_session", "openai", made.server.base_url, None),
            ):
                sessions = [made.make(turns) for _ in range(requests // turns)]
                job = {"client": client, "url": url, "turns": turns, "at_once": at_once, "rate": rate}
                found = await _played(job | {"keys": [one.api_key for one in sessions]})
                for figure, value in found.items():
                    figures.setdefault(name, {}).setdefault(figure, []).append(value)
                for one in sessions:
                    made.server.remove(one)
        await made.server.close()
    await runner.cleanup()
    report: dict[str, Any] = {
        name: {figure: spread(values) for figure, values in found.items()} for name, found in figures.items()
    }
    for client in CLIENTS:
        stub, session = (figures[f"{client}_{side}"]["requests_per_s"] for side in ("stub", "session"))
        report[f"{client}_session_over_stub"] = spread(a / b for a, b in zip(session, stub, strict=True))
    return report | {"others_cores": round(others.cores(), 2), "at_once": at_once, "turns": turns}


def main() -> None:
    """Measure, or be the client."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(uvloop.run(play(json.load(sys.stdin)))))
        return
    print(json.dumps(uvloop.run(measure(args.requests, args.turns, args.at_once, args.rounds))))


if __name__ == "__main__":
    main()
