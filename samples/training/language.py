"""The frozen language model, as the training of the vision part needs it: image embeddings in, losses out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, DynamicCache, LlamaForCausalLM

TOKENS_PER_TILE = 64
_IMAGE = "<image>"
_FAKE = "<fake_token_around_image>"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a picture lies in the prompt: token ids, each one's tile and position, and where its embeddings go.

    `owners` are indices into the picture's tiles, the whole picture last. `slots` are the places in `ids` that take
    image embeddings, `cells` the embedding for each: tile x 64 + cell. `length` counts the positions of the whole
    picture, also where tokens were left out.
    """

    ids: tuple[int, ...]
    owners: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    cells: tuple[int, ...]
    length: int


def thinned(layout: Layout, cells: frozenset[int]) -> Layout:
    """The same layout with only the image tokens of `cells`, at their true positions, and their tiles' marks.

    A prompt of nine tiles costs six times as much to train on as one of one tile; the language model can learn to
    read any part of it from few of its tokens, since what it sees depends on positions, not on how many there are.
    """
    kept = {cell // TOKENS_PER_TILE for cell in cells}
    of_slot = dict(zip(layout.slots, layout.cells, strict=True))
    wanted = [
        place
        for place, owner in enumerate(layout.owners)
        if owner in kept and (place not in of_slot or of_slot[place] in cells)
    ]
    return Layout(
        ids=tuple(layout.ids[place] for place in wanted),
        owners=tuple(layout.owners[place] for place in wanted),
        positions=tuple(layout.positions[place] for place in wanted),
        slots=tuple(new for new, place in enumerate(wanted) if place in of_slot),
        cells=tuple(of_slot[place] for place in wanted if place in of_slot),
        length=layout.length,
    )


class Language:
    """SmolLM2 with the image tokens, its weights frozen, read from a built checkpoint; `dtype`: of its weights."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self.tokenizer: Any = self.processor.tokenizer
        config = AutoConfig.from_pretrained(checkpoint).text_config
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {}
        with safe_open(str(checkpoint / "model.safetensors"), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                if name.startswith("model.text_model."):
                    state[name.replace("text_model.", "")] = weights.get_tensor(name).to(dtype)
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, assign=True)
        # Buffers that are computed, not stored, were left on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self.model: Any = model.eval().requires_grad_(False)
        self.embed: nn.Embedding = self.model.get_input_embeddings()

    @lru_cache(maxsize=64)  # noqa: B019 - one Language lives as long as the program
    def prefix(self, prompt: str, system: str | None = None) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """Keys and values of the turns up to the picture, one pair a layer, and how many tokens they are."""
        text = self.template(prompt, system).split(_IMAGE)[0]
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            cache = self.model.model(input_ids=ids, use_cache=True).past_key_values
        return [(layer.keys, layer.values) for layer in cache.layers], ids.shape[1]

    def template(self, prompt: str, system: str | None = None) -> str:
        """The whole prompt as text, with one `<image>` for the picture."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": [{"type": "text", "text": prompt}, {"type": "image"}]})
        return str(self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    @lru_cache(maxsize=8)  # noqa: B019
    def layout(self, rows: int, columns: int) -> Layout:
        """The tokens of a picture of `rows` x `columns` tiles and the whole; 0 x 0: of one tile."""
        ids: list[int] = []
        owners: list[int] = []

        def put(text: str, owner: int) -> None:
            new = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.extend(new)
            owners.extend([owner] * len(new))

        for row in range(rows):
            for column in range(columns):
                end = "" if column < columns - 1 else "\n" if row < rows - 1 else "\n\n"
                tile = row * columns + column
                put(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{_IMAGE * TOKENS_PER_TILE}{end}", tile)
        whole = rows * columns
        put(f"{_FAKE}<global-img>{_IMAGE * TOKENS_PER_TILE}{_FAKE}", whole)
        image = self.tokenizer.convert_tokens_to_ids(_IMAGE)
        slots = tuple(place for place, token in enumerate(ids) if token == image)
        return Layout(tuple(ids), tuple(owners), tuple(range(len(ids))), slots, tuple(range(len(slots))), len(ids))

    def loss(self, images: Tensor, layout: Layout, prompt: str, answers: list[str]) -> Tensor:
        """Mean negative log likelihood of the answers' tokens.

        `images` (B, len(layout.slots), width) go into the layout's slots; all of a batch share prompt and layout.
        """
        pairs, before = self.prefix(prompt)
        count = images.shape[0]
        tail = self.template(prompt).split(_IMAGE)[1]
        head_ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
        rows = [self.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"] for answer in answers]
        longest = max(len(row) for row in rows)
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        known = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], dtype=torch.bool)
        fixed = self.embed(torch.tensor(layout.ids)).expand(count, -1, -1).clone()
        fixed[:, list(layout.slots)] = images.to(fixed.dtype)
        text = torch.cat([torch.tensor(head_ids).expand(count, -1), padded[:, :-1]], 1)
        inputs = torch.cat([fixed, self.embed(text)], 1)
        after = torch.arange(layout.length, layout.length + text.shape[1])
        positions = before + torch.cat([torch.tensor(layout.positions), after])
        cache = DynamicCache()
        for index, (keys, values) in enumerate(pairs):
            cache.update(keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1), index)
        hidden = self.model.model(
            inputs_embeds=inputs, position_ids=positions[None].expand(count, -1), past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -longest:]
        logits = self.model.lm_head(hidden[known])
        return nn.functional.cross_entropy(logits.float(), padded[known])
