"""Words that are one token each in the served model's vocabulary, so that a text has exactly the tokens it should.

Tokenizers of today's models cut at spaces before anything else, so words that are one token each, with and without a
space before them, make a text of as many tokens as it has words. Which words are is asked of the server (vLLM's
`/tokenize`); where it cannot be asked, very common words are taken and the text is exact only as far as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from serving.address import STRAIGHT_TO_LOOPBACK

_COMMON = """
about after again air all also am an and animal answer any are around as ask at away back be because been before
big book both boy but by call came can car change children city close cold come could country cut day did do does
door down each earth end even every eye face family far father feet few find fire first fish five food for form
found four from game gave get girl give go good great green group had half hand hard has have he head help her here
high him his home hot house how if in into is it its keep kind know land large last late learn left less let life
light like line little live long look made make man many may me men might mind more most mother move much must my
name near need never new next night no not now number of off often old on once one only open or other our out over
own page paper part people place plan play point power put read real red right river road room round run said same
saw say school sea second see seem set she ship short should show side since small so some song soon sound stand
start state still stop story street study such sun system table take talk tell ten than that the their them then
there these they thing think this those three through time to too took top town tree turn two under up us use very
voice wait walk want war was watch water way we well went were what when where which while white who why will wind
with word work world would write year you young your
"""
_CANDIDATES = tuple(_COMMON.split())
_ENOUGH = 64
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Words:
    """Words to make texts of. `exact`: the server confirmed that each is one token."""

    words: tuple[str, ...]
    exact: bool

    def text(self, tokens: int, rng: np.random.Generator) -> str:
        """Random words, `tokens` of them."""
        return " ".join(self.words[index] for index in rng.integers(0, len(self.words), tokens))


async def find_words(endpoint: str, model: str, api_key: str | None = None) -> Words:
    """Words of one token each for the model that `endpoint` (usually ending in /v1) serves."""
    url = f"{endpoint.rstrip('/').removesuffix('/v1')}/tokenize"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers, mounts=STRAIGHT_TO_LOOPBACK) as client:

        async def count(text: str) -> int:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            answer = await client.post(url, json=body)
            answer.raise_for_status()
            return int(answer.json()["count"])

        try:
            together = await count(" ".join(_CANDIDATES)) == len(_CANDIDATES)
            # Some vocabularies have a word only with its space: as the first of a text it would be two tokens.
            alone = await asyncio.gather(*map(count, _CANDIDATES))
            kept = [word for word, tokens in zip(_CANDIDATES, alone, strict=True) if tokens == 1]
            if not together:
                after = await asyncio.gather(*(count(f"{word} {word}") for word in kept))
                kept = [word for word, tokens in zip(kept, after, strict=True) if tokens == 2]
            exact = len(kept) >= _ENOUGH and await count(" ".join(kept)) == len(kept)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return Words(_CANDIDATES, exact=False)
    return Words(tuple(kept), exact=True) if exact else Words(_CANDIDATES, exact=False)


def join(parts: Sequence[str]) -> str:
    """Texts one after the other; the tokens add up."""
    return " ".join(part for part in parts if part)
