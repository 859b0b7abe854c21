"""Are the client's figures right? Against the engine's own step ends, and against vLLM's own benchmark.

    python -m tests.benchmarks.fidelity [--requests 200] [--at-once 8] [--tokens 8] [--save FILE] [--set KEY=VALUE]

Serves the sample model, sends chats, and prints for every token how long it took from the end of the step that made it
to the client's socket (the server's front end; the kernel's receive time stamp) and from there to the client's time
stamp; p95 of the latter must be under 2 ms. Then some of the answers, as they came, go through the formulas of
`vllm bench serve`. --save keeps those for tests.

Where the model computes on every core, the client waits for one, and that is in the figures: with --set
serving.server.cpu_threads=1 a core of two is left for the server's front end and the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from serving.client import ModelClient, ModelRequest
from serving.command import server_python
from serving.compare.fidelity import RecordedStream, compare_figures, engine_delays, vllm_figures
from serving.compare.tables import StepRow, request_row
from serving.config import Timeouts
from serving.latency import Percentiles
from serving.records import Outcome, RequestRecord, now_s
from serving.scheduler.steps import StepReader
from serving.workload import PlannedRequest
from tests.integration.served import served
from tests.recording import Recording, recording

_REPLAYED = 20
_MOST_CLIENT_S = 0.002


async def ask(endpoint: str, requests: int, at_once: int, tokens: int) -> list[RequestRecord]:
    """That many chats, `at_once` of them in flight."""
    client = ModelClient(endpoint, model=None, timeouts=Timeouts())
    slots = asyncio.Semaphore(at_once)

    async def one(number: int) -> RequestRecord:
        async with slots:
            request = ModelRequest(
                traffic_class="chat",
                messages=[{"role": "user", "content": f"Say something about the number {number}."}],
                max_tokens=tokens,
                due_s=now_s(),
                extra_body={"ignore_eos": True},
            )
            return await client.start(request).result()

    try:
        return await asyncio.gather(*(one(number) for number in range(requests)))
    finally:
        await client.close()


def in_ms(figures: Percentiles) -> dict[str, float | int | None]:
    return {
        name.replace("_s", "_ms"): round(1000 * value, 3) if isinstance(value, float) else value
        for name, value in asdict(figures).items()
    }


def save(path: Path, streams: list[RecordedStream]) -> None:
    """Times from the first request's due on."""
    start_s = min(stream.due_s for stream in streams)
    tree = [
        {
            "request_id": stream.request_id,
            "due_s": stream.due_s - start_s,
            "sent_s": stream.sent_s - start_s,
            "max_tokens": stream.max_tokens,
            "chunks": [[at_s - start_s, data.decode()] for at_s, data in stream.chunks],
        }
        for stream in streams
    ]
    path.write_text(json.dumps(tree, indent=0) + "\n")


def report(
    records: list[RequestRecord], recorded: Recording, steps: list[StepRow], options: argparse.Namespace
) -> bool:
    """Print both comparisons; whether they came out as they must."""
    rows = [
        request_row(
            record, PlannedRequest(number, "chat", 0.0, record.prompt_tokens or 0, options.tokens),
            block=0, arm="", image_tokens=0, warm_up=False, behind_cap_s=0.0,
        )
        for number, record in enumerate(records)
    ]  # fmt: skip
    delays = engine_delays(rows, steps, recorded.socket_times())
    found = {"step end to socket": in_ms(delays.front_end), "socket to time stamp": in_ms(delays.client)}
    print(json.dumps({**found, "tokens not matched": delays.unmatched, "steps": len(steps)}, indent=2), flush=True)
    streams = [recorded.stream(record, options.tokens) for record in records[:_REPLAYED]]
    if options.save is not None:
        save(options.save, streams[:4])
    agreement = compare_figures(streams, vllm_figures(server_python(options.config), streams))
    widest = {}
    for difference in agreement.differences:
        if abs(difference.size_s) >= abs(widest.get(difference.name, difference).size_s):
            widest[difference.name] = difference
    print(
        json.dumps(
            {
                "against vllm bench serve": {
                    "requests": agreement.requests,
                    "gaps compared": agreement.gaps,
                    "largest difference of a gap, ms": 1000 * agreement.gap_error_s,
                    "largest difference of a percentile, ms": agreement.percentile_error_ms,
                    "exact where the definitions agree": agreement.exact,
                    "largest differences by definition, ms": {
                        name: {
                            "ours": round(1000 * one.ours_s, 4), "theirs": round(1000 * one.theirs_s, 4),
                            "size": round(1000 * one.size_s, 4), "left": 1000 * one.left_s, "why": one.why,
                        }
                        for name, one in widest.items()
                    },
                },
            },
            indent=2,
        )
    )  # fmt: skip
    quick = delays.client.p95_s is not None and delays.client.p95_s < _MOST_CLIENT_S
    print(f"socket to time stamp, p95 under {1000 * _MOST_CLIENT_S:g} ms: {'yes' if quick else 'NO'}")
    return quick and agreement.exact


def main() -> None:
    """Measure and print; exit code 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--set", action="append", default=[], help="key=value of the deployment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, served(Path(name), *options.set) as server:
        options.config = server.config.serving.server
        asyncio.run(ask(server.endpoint, 2 * options.at_once, options.at_once, options.tokens))  # warm
        reader = StepReader(Path(name), from_now=True)
        with recording() as recorded:
            records = asyncio.run(ask(server.endpoint, options.requests, options.at_once, options.tokens))
        failed = [record.error for record in records if record.outcome is not Outcome.DONE]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
        time.sleep(0.3)  # until the last step is written
        steps = reader.read()
    sys.exit(0 if report(records, recorded, steps, options) else 1)


if __name__ == "__main__":
    main()
