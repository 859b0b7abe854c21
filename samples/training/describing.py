"""The sample VLM through transformers: the reference that a served model is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pil
from safetensors.torch import load_file
from transformers import AutoProcessor, Idefics3ForConditionalGeneration

from samples.backdrops import Image
from samples.training.facts import DEFAULT_PROMPT
from serving.command import cpu_dtype

MAX_TOKENS = 48


def served_dtype(asked: str = "auto") -> torch.dtype:
    """What a model server on this machine's CPU computes in if its settings ask for that."""
    return torch.float32 if cpu_dtype(asked) == "float32" else torch.bfloat16


class Reference:
    """Greedy answers of a built checkpoint; `weights` replaces its vision part; without `splitting`, in one tile."""

    def __init__(
        self,
        checkpoint: Path,
        weights: Path | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        splitting: bool = True,
    ) -> None:
        self.splitting = splitting
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self.model: Any = Idefics3ForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype).eval()
        if weights is not None:
            state = {name: tensor.to(dtype) for name, tensor in load_file(weights).items()}
            strange = self.model.load_state_dict(state, strict=False).unexpected_keys
            if strange:
                raise ValueError(f"{weights} does not fit: {strange[0]}")

    def answer(self, picture: Image | None, prompt: str = DEFAULT_PROMPT, *, max_tokens: int = MAX_TOKENS) -> str:
        """The answer to `prompt` about an (H, W, 3) RGB picture, or to the prompt alone."""
        return self.answers([picture], prompt, max_tokens=max_tokens)[0]

    def answers(
        self, pictures: Sequence[Image | None], prompt: str = DEFAULT_PROMPT, *, max_tokens: int = MAX_TOKENS
    ) -> list[str]:
        """As `answer` for several pictures together, which must become equally many tokens each."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
        images = [[Pil.fromarray(picture)] for picture in pictures if picture is not None] or None
        if images:
            parts.append({"type": "image"})
        messages = [{"role": "user", "content": parts}]
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.processor(
            text=[text] * len(pictures), images=images, return_tensors="pt", do_image_splitting=self.splitting
        )
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with torch.no_grad():
            out = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
        new = out[:, inputs["input_ids"].shape[1] :]
        return [said.strip() for said in self.processor.tokenizer.batch_decode(new, skip_special_tokens=True)]
