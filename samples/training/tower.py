"""The trained part of the sample VLM: vision tower and connector, with the heads that teach the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer

from samples.training.questions import COUNTS, NEAREST, PATCHED

_SERVED = ("vision_model.", "connector.")
LOOKING_LAYERS = 6  # that find out what there is to see; those after them carry it to where it must be said


class Tower(nn.Module):
    """Tiles (N, 256, 256, 3) of bytes to image embeddings (N, 64, 576): `connector(spelled(seen(tiles)))`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_model: Any = Idefics3VisionTransformer(config.vision_config)
        self.connector: Any = Idefics3Connector(config)
        width = config.vision_config.hidden_size
        self.norm = nn.LayerNorm(width, eps=config.vision_config.layer_norm_eps)  # before the heads
        self.patches = nn.Linear(width, sum(PATCHED.values()))
        self.counts = nn.Linear(width, COUNTS)
        self.attention = nn.Linear(width, len(NEAREST))  # to the patches that show it: a bag's are not a hat's
        self.answers = nn.Linear(width, sum(NEAREST.values()))

    def seen(self, tiles: Tensor, kept: Tensor | None = None) -> Tensor:
        """What the first layers make of bytes (N, 256, 256, 3): (N, 256, width), or of the patches `kept` (N, P)."""
        pixels = tiles.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        model = self.vision_model
        patches = [size // model.patch_size for size in pixels.shape[2:]]
        every = torch.ones(len(tiles), *patches, dtype=torch.bool)
        hidden: Tensor = model.embeddings(pixel_values=pixels, patch_attention_mask=every)
        if kept is not None:
            hidden = hidden.gather(1, kept[..., None].expand(-1, -1, hidden.shape[-1]))
        for layer in model.encoder.layers[:LOOKING_LAYERS]:
            hidden = layer(hidden, None)
        return hidden

    def spelled(self, seen: Tensor) -> Tensor:
        """What the last layers make of what the first have seen (N, 256, width): the same shape, for the connector."""
        for layer in self.vision_model.encoder.layers[LOOKING_LAYERS:]:
            seen = layer(seen, None)
        return torch.as_tensor(self.vision_model.post_layernorm(seen))

    @torch.no_grad()
    def begin_spelling(self) -> None:
        """Let the last layers' attention start where the heads look for what the nearest person is like.

        One head of attention for each of NEAREST: every patch gets what the answer is taken from, wherever it lies.
        """
        layers = self.vision_model.encoder.layers[LOOKING_LAYERS:]
        heads = [(layer, head) for layer in layers for head in range(layer.self_attn.num_heads)]
        answers = self.answers.weight.split_with_sizes(list(NEAREST.values()))
        for layer in layers:
            layer.layer_norm1.load_state_dict(self.norm.state_dict())
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                nn.init.zeros_(part.bias)
                part.weight *= 0.1
            nn.init.normal_(layer.self_attn.v_proj.weight, std=0.05)
            nn.init.normal_(layer.self_attn.out_proj.weight, std=0.1)
            for nothing in (layer.self_attn.out_proj.bias, layer.mlp.fc2.weight, layer.mlp.fc2.bias):
                nn.init.zeros_(nothing)
        for question, (layer, head) in enumerate(heads[: len(answers)]):
            attention = layer.self_attn
            first = head * attention.head_dim
            attention.q_proj.weight[first] = 0.0
            attention.q_proj.bias[first] = attention.head_dim**0.5  # the same question from every patch
            attention.k_proj.weight[first] = self.attention.weight[question]
            attention.v_proj.weight[first : first + len(answers[question])] = answers[question]

    def spelling_parameters(self) -> list[nn.Parameter]:
        """Those that `spelled` and the connector use."""
        model = self.vision_model
        parts = (model.encoder.layers[LOOKING_LAYERS:], model.post_layernorm, self.connector)
        return [parameter for part in parts for parameter in part.parameters()]

    def patched(self, features: Tensor) -> tuple[Tensor, ...]:
        """About every patch: each of PATCHED (N, P, answers), from what is seen, normed (N, P, width)."""
        return torch.split(self.patches(features), list(PATCHED.values()), dim=-1)

    def count(self, features: Tensor) -> Tensor:
        """How many people, (N, COUNTS) from what is seen, normed (N, P, width)."""
        return torch.as_tensor(self.counts(features.mean(1)))

    def nearest(self, features: Tensor) -> tuple[Tensor, ...]:
        """What the nearest person is like: each of NEAREST (N, answers), from what is seen, normed (N, P, width)."""
        shares = self.attention(features).softmax(1)
        looked_at = torch.einsum("npq,npw->qnw", shares, features)
        sizes = list(NEAREST.values())
        heads = zip(self.answers.weight.split_with_sizes(sizes), self.answers.bias.split_with_sizes(sizes), strict=True)
        return tuple(nn.functional.linear(at, *head) for at, head in zip(looked_at, heads, strict=True))

    def load(self, path: Path) -> None:
        """Read tower and connector, `model.vision_model.*` and `model.connector.*`; the heads stay as they are."""
        state = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(path).items()}
        missing, strange = self.load_state_dict(state, strict=False)
        lacking = [name for name in missing if name.startswith(_SERVED)]
        if lacking or strange:
            raise ValueError(f"{path} does not fit: {(lacking + strange)[0]}")

    def export(self, path: Path) -> None:
        """Write tower and connector in bfloat16."""
        state = {
            f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous()
            for name, tensor in self.state_dict().items()
            if name.startswith(_SERVED)
        }
        save_file(state, path, metadata={"format": "pt"})

    def heads(self) -> dict[str, Tensor]:
        """The weights that only training uses: what teaches the tower, by name."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(_SERVED)}


def make_tower(checkpoint: Path) -> Tower:
    """An untrained tower of the sizes of a built checkpoint."""
    return Tower(Idefics3Config.from_pretrained(checkpoint))
