"""The served sample model against transformers: the same words, with and without pictures; and its speed."""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from openai import BadRequestError, OpenAI

from samples import vlm
from samples.backdrops import Image
from samples.checkpoint import load_language_model
from samples.training.describing import MAX_TOKENS, Reference, served_dtype
from samples.training.evaluate_vlm import scene_cases
from samples.training.facts import DEFAULT_PROMPT

CHAT_PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 plus 30?",
    "Name three fruits.",
    "Explain gravity to a child.",
    "Translate 'good morning' into French.",
    "What does a carpenter do?",
    "Give me a title for a story about a dog.",
    "How many days does a week have?",
    "What is water made of?",
    "Why is the sky blue?",
    "List two uses of a hammer.",
    "Who wrote Romeo and Juliet?",
    "What is the opposite of hot?",
    "Write a short greeting for a letter.",
    "What is a prime number?",
    "How do plants eat?",
    "Name a planet with rings.",
    "What is the largest ocean?",
    "Say something kind.",
)
CHAT_TOKENS = 32


def png_part(picture: Image) -> dict[str, Any]:
    """An image part that carries an RGB picture without loss."""
    done, data = cv2.imencode(".png", picture[..., ::-1])
    if not done:
        raise ValueError(f"a picture of shape {picture.shape} cannot be made a PNG")
    url = "data:image/png;base64," + base64.b64encode(data.tobytes()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def language_alone(prompts: tuple[str, ...]) -> list[str]:
    """Greedy answers of the packaged language model without any vision part, in float32."""
    model, tokenizer = load_language_model()
    model = model.float()
    answers = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=CHAT_TOKENS)
        answers.append(str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip())
    return answers


class Served:
    """Greedy answers of a running server."""

    def __init__(self, endpoint: str) -> None:
        self.client = OpenAI(base_url=endpoint, api_key=os.environ.get("FRAMECHAT_API_KEY", "none"))
        self.model = self.client.models.list().data[0].id

    def answer(self, picture: Image | None, prompt: str = DEFAULT_PROMPT, *, max_tokens: int = MAX_TOKENS) -> str:
        """The same question as Reference.answer."""
        parts: list[Any] = [{"type": "text", "text": prompt}]
        if picture is not None:
            parts.append(png_part(picture))
        messages: Any = [{"role": "user", "content": parts}]
        reply = self.client.chat.completions.create(
            model=self.model, messages=messages, temperature=0.0, max_tokens=max_tokens
        )
        return (reply.choices[0].message.content or "").strip()

    def speed(self, picture: Image, *, splitting: bool) -> tuple[float, float, int]:
        """(time to first token in s, tokens a second after it, prompt tokens) for one picture of its own."""
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": DEFAULT_PROMPT}, png_part(picture)]}]
        extra: dict[str, Any] = {"ignore_eos": True}
        usage: Any = {"include_usage": True, "continuous_usage_stats": True}  # the latter is vLLM's own
        if not splitting:
            extra["mm_processor_kwargs"] = {"do_image_splitting": False}
        began_s, times_s, prompt_tokens, tokens = time.perf_counter(), [], 0, 0
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            temperature=0.0,
            max_tokens=32,
            stream=True,
            stream_options=usage,
            extra_body=extra,
        )
        for chunk in stream:
            if chunk.usage and chunk.usage.completion_tokens > tokens:
                times_s.append(time.perf_counter())
                prompt_tokens, tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        return times_s[0] - began_s, (tokens - 1) / (times_s[-1] - times_s[0]), prompt_tokens


def run(options: argparse.Namespace) -> int:
    """The `served` part of the command line; 1 when any answer differs."""
    checkpoint = vlm.ensure_checkpoint(python=Path(sys.executable))
    dtype = served_dtype(options.dtype)
    served, reference = Served(options.endpoint), Reference(checkpoint, dtype=dtype)
    same = 0
    for case in scene_cases(options.count):
        expected, got = reference.answer(case.picture), served.answer(case.picture)
        same += expected == got
        if expected != got:
            print(f"{case.name}\n  transformers: {expected}\n  served:       {got}", flush=True)
    print(f"| same description | {same}/{options.count} |")
    prompts = CHAT_PROMPTS[: options.count]
    # In float32: with 16 bits, near ties fall as the shapes of the two models' products have it.
    exact = reference if dtype == torch.float32 else Reference(checkpoint)
    alone = language_alone(prompts)
    joined = [exact.answer(None, prompt, max_tokens=CHAT_TOKENS) for prompt in prompts]
    unchanged = sum(one == other for one, other in zip(alone, joined, strict=True))
    print(f"| same chat answer with and without the vision part | {unchanged}/{len(prompts)} |", flush=True)
    rng = np.random.default_rng(4)
    for name, splitting, shape in (
        ("1 tile", False, (1024, 1024)),
        ("9 tiles", True, (1024, 512)),
        ("17 tiles", True, (1024, 1024)),
    ):
        try:
            pictures = [rng.integers(0, 255, (*shape, 3), np.uint8) for _ in range(6)]
            _, *runs = [served.speed(picture, splitting=splitting) for picture in pictures]  # the first warms up
        except BadRequestError as error:  # such as a server that was not told to trust requests
            print(f"| {name} | refused: {' '.join(str(error).split())[:160]} |", flush=True)
            continue
        first_s = statistics.median(run[0] for run in runs)
        rate = statistics.median(run[1] for run in runs)
        print(f"| {name} | {runs[0][2]} prompt tokens | TTFT p50 {first_s:.2f} s | {rate:.0f} tokens/s |", flush=True)
    return 0 if same == options.count and unchanged == len(prompts) else 1
