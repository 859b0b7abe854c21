"""Recorded streams through vLLM's own benchmark client and formulas. Runs in the server's environment, by its path.

Takes {"streams": [{"sent_s", "chunks": [[at_s, base64], ...]}, ...], "percentiles": [...], "duration_s"} on stdin.
Writes one line of JSON with every request's figures and the pooled ones. The benchmark's code runs as it is: only its
clock and its HTTP session are replaced, by ones that play the recording.
"""

import asyncio
import base64
import json
import sys
from types import SimpleNamespace
from typing import Any

from vllm.benchmarks.lib import endpoint_request_func as bench
from vllm.benchmarks.serve import calculate_metrics


class Player:
    """A session whose answer is the recording, and the clock that goes with it."""

    def __init__(self, sent_s: float, chunks: list[tuple[float, bytes]]) -> None:
        self.now_s = sent_s
        self._chunks = chunks
        self.status, self.reason = 200, "OK"
        self.content = self

    def post(self, **_arguments: Any) -> "Player":
        """The answer to whatever was asked."""
        return self

    async def __aenter__(self) -> "Player":
        return self

    async def __aexit__(self, *_error: object) -> None:
        return None

    async def iter_any(self) -> Any:
        """The reads, each at its time."""
        for at_s, data in self._chunks:
            self.now_s = at_s
            yield data

    def perf_counter(self) -> float:
        """The recording's time."""
        return self.now_s


def play(stream: dict[str, Any]) -> Any:
    """One recording's RequestFuncOutput."""
    player = Player(stream["sent_s"], [(at_s, base64.b64decode(data)) for at_s, data in stream["chunks"]])
    bench.time = player
    asked = bench.RequestFuncInput(
        prompt="", api_url="http://recorded/v1/chat/completions", prompt_len=0, output_len=1, model="m"
    )
    return asyncio.run(bench.async_request_openai_chat_completions(asked, player))


def main() -> None:
    """Read, play, calculate, write."""
    asked = json.load(sys.stdin)
    outputs = [play(stream) for stream in asked["streams"]]
    bench.time = SimpleNamespace()
    metrics, lengths = calculate_metrics(
        input_requests=[],
        outputs=outputs,
        dur_s=asked["duration_s"],
        tokenizer=None,
        selected_percentiles=asked["percentiles"],
        goodput_config_dict={},
    )
    answer = {
        "requests": [
            {"success": one.success, "ttft_s": one.ttft, "itl_s": one.itl, "latency_s": one.latency, "tokens": tokens}
            for one, tokens in zip(outputs, lengths, strict=True)
        ],
        "completed": metrics.completed,
        "output_throughput": float(metrics.output_throughput),
        "percentiles_ms": {
            name: [float(value) for _, value in getattr(metrics, f"percentiles_{name}_ms")]
            for name in ("ttft", "tpot", "itl")
        },
    }
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
