"""The trained part of the sample VLM: vision tower and connector, with the heads that teach the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer

from samples.training.views import ACTIONS, CLASSES

COUNTS = 5  # nobody, one, two, three, more


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

    def features(self, tiles: Tensor) -> Tensor:
        """(N, 256, width) of bytes (N, 256, 256, 3)."""
        pixels = tiles.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        hidden: Tensor = self.vision_model(pixel_values=pixels).last_hidden_state
        return hidden

    def load(self, path: Path) -> None:
        """Read tower and connector, `model.vision_model.*` and `model.connector.*`; the heads stay as they are."""
        state = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(path).items()}
        missing, strange = self.load_state_dict(state, strict=False)
        lacking = [name for name in missing if not name.startswith(("classes", "actions", "counts"))]
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
