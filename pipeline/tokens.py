"""How many tokens a text is, for deciding what fits: never more than its bytes, exactly when the server tells."""

from __future__ import annotations

import math

import httpx

from serving.tls import certificates

_BYTES_PER_TOKEN = 3.0  # English is 4 to 5 with today's tokenizers; too low an estimate would overflow the prompt
_ASK_AT_MOST_BYTES = 1_000_000
_TIMEOUT_S = 5.0
MESSAGE_TOKENS = 8  # role and separators of one message, generously


def estimate_tokens(text: str) -> int:
    """Roughly how many tokens `text` is, on the high side for prose."""
    return math.ceil(len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN)


def most_tokens(text: str) -> int:
    """A bound that no byte-level tokenizer exceeds: one token a byte."""
    return len(text.encode("utf-8", "replace"))


class TokenCounter:
    """Asks the server (vLLM's /tokenize) for exact counts; estimates where it cannot say."""

    def __init__(self, endpoint: str, headers: dict[str, str]) -> None:
        self._url = endpoint.removesuffix("/v1") + "/tokenize"
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers, trust_env=False, verify=certificates())
        self._offered = True

    async def count(self, text: str, model: str | None) -> tuple[int, bool]:
        """Tokens of `text`, and whether that is exact."""
        if self._offered and most_tokens(text) <= _ASK_AT_MOST_BYTES:
            body: dict[str, object] = {"prompt": text, "add_special_tokens": False}
            if model is not None:
                body["model"] = model
            try:
                answer = await self._http.post(self._url, json=body)
                if answer.status_code in (404, 405):
                    self._offered = False
                elif answer.status_code == 200:
                    count = answer.json().get("count")
                    if isinstance(count, int):
                        return count, True
            except (httpx.HTTPError, ValueError, AttributeError):
                pass  # an estimate will do
        return estimate_tokens(text), False

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
