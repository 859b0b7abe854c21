"""What a vLLM server says of its memory while it starts, read from its log.

Known wordings: releases 0.6 to 0.32 (`Available KV cache memory`, `GPU KV cache size`, `# GPU blocks`, `Model loading
took`, `Maximum concurrency`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30
_AVAILABLE = re.compile(r"Available KV cache memory:\s*(-?[\d.]+)\s*GiB|reserved for KV Cache is\s*(-?[\d.]+)GiB")
_EXPLICIT = re.compile(r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache")
_TOKENS = re.compile(r"(?:GPU|CPU|[A-Z]+)(?: \+ host)? KV cache size:\s*([\d,]+)\s*tokens")
_BLOCKS = re.compile(r"(?:GPU|cuda|CUDA) blocks:\s*(\d+)")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request:\s*([\d.]+)x")
_WEIGHTS = re.compile(r"(?:Model loading took|model weights take|Loading (?:model )?weights took)\s*([\d.]+)\s*Gi?B")


@dataclass(frozen=True, slots=True)
class StartupReport:
    """The server's own figures; None where the log does not say. GiB in logs are rounded to two decimals."""

    cache_bytes: int | None = None
    cache_tokens: int | None = None
    cache_blocks: int | None = None
    concurrency: float | None = None
    concurrency_tokens: int | None = None
    weight_bytes: int | None = None


def read_startup_log(text: str) -> StartupReport:
    """Collect the last of each figure: a restarted server's log holds several."""
    available = _last(_AVAILABLE, text) or _last(_EXPLICIT, text)
    tokens = _last(_TOKENS, text)
    blocks = _last(_BLOCKS, text)
    concurrency = _last(_CONCURRENCY, text)
    weights = _last(_WEIGHTS, text)
    return StartupReport(
        cache_bytes=int(float(available[0]) * GIB) if available else None,
        cache_tokens=_whole(tokens[0]) if tokens else None,
        cache_blocks=_whole(blocks[0]) if blocks else None,
        concurrency=float(concurrency[1]) if concurrency else None,
        concurrency_tokens=_whole(concurrency[0]) if concurrency else None,
        weight_bytes=int(float(weights[0]) * GIB) if weights else None,
    )


def _last(pattern: re.Pattern[str], text: str) -> list[str] | None:
    """Non-empty groups of the last match."""
    found = None
    for match in pattern.finditer(text):
        found = [group for group in match.groups() if group is not None]
    return found


def _whole(text: str) -> int:
    return int(text.replace(",", ""))
