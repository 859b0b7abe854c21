"""What the client adds to inter-token latency, against a bare `openai` loop on the same server in the same run.

    python -m tests.benchmarks.client_overhead [--server-url URL] [--rounds N] [--tokens N]

Three ways ask the same question for the same number of tokens: a bare loop over `openai`'s stream, the client in this
process, and `framechat chat` in a process of its own. They do it in turn, in another order each round, and then two at
a time, each against the bare loop: both answers are then made by the same steps of the engine, so that whatever else
the machine does falls on both alike. In turn shows what a way costs alone; at a time shows it with the noise taken out.
Without --server-url the sample model is served for the length of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import openai
import yaml

from serving.client import ModelClient, ModelRequest
from serving.config import Timeouts
from serving.records import Outcome, now_s
from tests.answering import free_port
from tests.integration.served import served

ROOT = Path(__file__).parents[2]
QUESTION = "Tell me a long story about a street, its houses and the people who walk there."
# The same number of tokens every time, whatever the model would like to say.
FIXED_LENGTH = {"ignore_eos": True}
_FIGURES = re.compile(r"ITL p50 ([\d.]+)")


async def bare(endpoint: str, model: str, tokens: int) -> list[float]:
    """Gaps in seconds, timed as anybody would: by the clock whenever the stream yields a chunk."""
    async with openai.AsyncOpenAI(base_url=endpoint, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body=FIXED_LENGTH,
        )
        arrivals = [time.perf_counter() async for chunk in stream if chunk.choices and not chunk.choices[0].delta.role]
    return [later - earlier for earlier, later in pairwise(arrivals)]


async def ours(client: ModelClient, tokens: int) -> list[float]:
    """Gaps in seconds as the client records them."""
    request = ModelRequest(
        traffic_class="chat",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=tokens,
        due_s=now_s(),
        extra_body=FIXED_LENGTH,
    )
    record = await client.start(request).result()
    if record.outcome is not Outcome.DONE:
        raise SystemExit(f"the request failed: {record.error}")
    return [gap.duration_s for gap in record.gaps]


async def terminal(config: Path, talking: asyncio.Event | None = None) -> float:
    """ITL p50 in seconds as `framechat chat` prints it; `talking` is set at its first words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ui.cli", "chat", "-c", str(config), "-m", QUESTION,
        cwd=ROOT, stdout=subprocess.PIPE,
    )  # fmt: skip
    out = b""
    if process.stdout is not None:
        while more := await process.stdout.read(4096):
            out += more
            if talking is not None:
                talking.set()
    found = _FIGURES.search(out.decode())
    if await process.wait() != 0 or found is None:
        raise SystemExit(f"framechat chat ended with {process.returncode}: {out.decode()[-300:]}")
    return float(found[1]) / 1000


def _p50_s(gaps: list[float]) -> float:
    return statistics.median(gaps)


class Run:
    """The three ways on one server."""

    def __init__(self, endpoint: str, model: str, client: ModelClient, config: Path, tokens: int) -> None:
        self._endpoint, self._model, self._client, self._config, self._tokens = endpoint, model, client, config, tokens

    async def bare(self) -> float:
        return _p50_s(await bare(self._endpoint, self._model, self._tokens))

    async def client(self) -> float:
        return _p50_s(await ours(self._client, self._tokens))

    async def chat(self) -> float:
        return await terminal(self._config)

    async def client_beside_bare(self) -> tuple[float, float]:
        return await asyncio.gather(self.client(), self.bare())

    async def chat_beside_bare(self) -> tuple[float, float]:
        talking = asyncio.Event()
        chat = asyncio.create_task(terminal(self._config, talking))
        await asyncio.wait({chat, asyncio.create_task(talking.wait())}, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(chat, self.bare())

    async def rounds(self, count: int) -> dict[str, object]:
        ways: dict[str, Callable[[], Awaitable[float]]] = {"bare": self.bare, "client": self.client, "chat": self.chat}
        for way in (self.bare, self.client):
            await way()  # warm
        in_turn: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(count):
            names = list(ways)
            for name in names[number % 3 :] + names[: number % 3]:
                in_turn[name].append(await ways[name]())
        client_pairs = [await self.client_beside_bare() for _ in range(count)]
        chat_pairs = [await self.chat_beside_bare() for _ in range(count)]
        bare_s = statistics.median(in_turn["bare"])
        return {
            "in turn, ITL p50 of each answer, ms": {name: [_ms(p50) for p50 in p50s] for name, p50s in in_turn.items()},
            "in turn, median over bare": {
                name: round(statistics.median(in_turn[name]) / bare_s, 4) for name in ("client", "chat")
            },
            "at a time, ITL p50, ms": {
                "client, bare": [[_ms(p50) for p50 in pair] for pair in client_pairs],
                "chat, bare": [[_ms(p50) for p50 in pair] for pair in chat_pairs],
            },
            "at a time, median over bare": {
                "client": round(statistics.median(ours_s / bare_s for ours_s, bare_s in client_pairs), 4),
                "chat": round(statistics.median(ours_s / bare_s for ours_s, bare_s in chat_pairs), 4),
            },
        }


def _ms(value_s: float) -> float:
    return round(1000 * value_s, 2)


async def measure(endpoint: str, folder: Path, rounds: int, tokens: int) -> dict[str, object]:
    """Run every way on the server at `endpoint`; return the figures."""
    config = folder / "deployment.yaml"
    chat = {"ttft_p95_ms": 1e6, "itl_p99_ms": 1e6, "max_tokens": tokens, "extra_body": FIXED_LENGTH}
    tree = {
        "serving": {
            "server": {"base_url": endpoint},
            "classes": {"camera": chat, "document": chat, "chat": chat},
        },
        "service": {"port": free_port()},  # nobody there: straight to the server
        "chat": {"system_prompt": ""},
    }
    config.write_text(yaml.safe_dump(tree))
    client = ModelClient(endpoint, model=None, timeouts=Timeouts())
    try:
        return await Run(endpoint, await client.served_model(), client, config, tokens).rounds(rounds)
    finally:
        await client.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-url", help="a running OpenAI-compatible server, ending in /v1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = options.server_url or stack.enter_context(served(folder)).endpoint
        print(json.dumps(asyncio.run(measure(endpoint, folder, options.rounds, options.tokens)), indent=2))


if __name__ == "__main__":
    main()
