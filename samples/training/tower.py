"""The trained part of the sample VLM: vision tower and connector, with the heads that teach the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer

from samples.training.views import ACTIONS, CLASSES, COUNTS, NEAREST


class Tower(nn.Module):
    """Tiles (N, 256, 256, 3) of bytes to image embeddings (N, 64, 576); `features` before the connector."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_model: Any = Idefics3VisionTransformer(config.vision_config)
        self.connector: Any = Idefics3Connector(config)
        width = config.vision_config.hidden_size
        self.classes = nn.Linear(width, CLASSES)
        self.actions = nn.Linear(width, len(ACTIONS))
        self.counts = nn.Linear(width, COUNTS)
        self.attention = nn.Linear(width, 1)  # to the patches of the nearest person
        self.answers = nn.Linear(width, sum(NEAREST.values()))

    def features(self, tiles: Tensor, kept: Tensor | None = None) -> Tensor:
        """(N, 256, width) of bytes (N, 256, 256, 3), or (N, P, width) of the patches `kept` (N, P) alone."""
        pixels = tiles.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        model = self.vision_model
        if kept is None:
            hidden: Tensor = model(pixel_values=pixels).last_hidden_state
            return hidden
        patches = [size // model.patch_size for size in pixels.shape[2:]]
        every = torch.ones(len(tiles), *patches, dtype=torch.bool)
        embedded = model.embeddings(pixel_values=pixels, patch_attention_mask=every)
        embedded = embedded.gather(1, kept[..., None].expand(-1, -1, embedded.shape[-1]))
        hidden = model.encoder(inputs_embeds=embedded, attention_mask=None).last_hidden_state
        return torch.as_tensor(model.post_layernorm(hidden))

    def count(self, features: Tensor) -> Tensor:
        """How many people, (N, COUNTS) from features (N, P, width)."""
        return torch.as_tensor(self.counts(features.mean(1)))

    def nearest(self, features: Tensor) -> tuple[Tensor, ...]:
        """What the nearest person is like: for each of NEAREST (N, answers), from features (N, P, width)."""
        share = self.attention(features).softmax(1)
        answers: Tensor = self.answers((share * features).sum(1))
        return tuple(answers.split_with_sizes(list(NEAREST.values()), dim=1))

    def load(self, path: Path) -> None:
        """Read tower and connector, `model.vision_model.*` and `model.connector.*`; the heads stay as they are."""
        state = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(path).items()}
        missing, strange = self.load_state_dict(state, strict=False)
        lacking = [name for name in missing if name.startswith(("vision_model", "connector"))]
        if lacking or strange:
            raise ValueError(f"{path} does not fit: {(lacking + strange)[0]}")

    def export(self, path: Path) -> None:
        """Write tower and connector in bfloat16."""
        kept = ("vision_model.", "connector.")
        state = {
            f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous()
            for name, tensor in self.state_dict().items()
            if name.startswith(kept)
        }
        save_file(state, path, metadata={"format": "pt"})


def make_tower(checkpoint: Path) -> Tower:
    """An untrained tower of the sizes of a built checkpoint."""
    return Tower(Idefics3Config.from_pretrained(checkpoint))
