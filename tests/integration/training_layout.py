"""Run with the model server's Python: does training see what the product sends? Prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pil
from transformers import Idefics3ForConditionalGeneration

from samples import vlm
from samples.figures import LOWER_KINDS
from samples.training.codebook import OPEN, WIDTHS, Codebook, imagined
from samples.training.facts import DEFAULT_PROMPT, description
from samples.training.framing import tiles_of
from samples.training.language import Language, thinned
from samples.training.tower import LOOKING_LAYERS, make_tower
from samples.training.views import Person
from samples.training.vlm import Trainer

ANSWER = "One person in a red top and blue trousers, walking left."


def lost_in_export(checkpoint: Path) -> float:
    """The most that a weight, a head or a code differs after an export that another training starts from."""
    with tempfile.TemporaryDirectory() as folder:
        options = argparse.Namespace(
            checkpoint=checkpoint,
            stage="tell",
            start=vlm.WEIGHTS,
            work=Path(folder),
            rate=1e-4,
            threads=1,
            bfloat16=False,
        )
        trainer = Trainer(options, [])
        torch.nn.init.normal_(trainer.tower.answers.weight)
        torch.nn.init.normal_(trainer.teacher.codebook.codes)
        options.start = Path(folder) / "exported.safetensors"
        trainer.export(options.start)
        again = Trainer(options, [])
    pairs = [
        *zip(trainer.tower.parameters(), again.tower.parameters(), strict=True),
        (trainer.teacher.codebook.codes, again.teacher.codebook.codes),
    ]
    return max(float(((one - other).abs() / (one.abs() + 1e-3)).max()) for one, other in pairs)


def _opened(codebook: Codebook, people: Sequence[Person], phrase: str) -> list[int]:
    return (codebook.opened(codebook.sentence(people), {phrase}) == OPEN).nonzero().flatten().tolist()


def main() -> None:
    checkpoint = vlm.ensure_checkpoint(python=Path(sys.executable))
    language, tower = Language(checkpoint), make_tower(checkpoint)
    tower.load(vlm.WEIGHTS)
    picture = np.random.default_rng(1).integers(0, 255, (1024, 512, 3), np.uint8)
    layout = language.layout(4, 2)
    sent = language.processor(
        text=language.template(DEFAULT_PROMPT), images=[Pil.fromarray(picture)], return_tensors="pt"
    )
    before = language.prefix(DEFAULT_PROMPT)[1]
    ids = sent["input_ids"][0].tolist()
    tiles = torch.from_numpy(tiles_of(picture))
    pixels = tiles.permute(0, 3, 1, 2).float() / 127.5 - 1
    model = Idefics3ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answer = language.tokenizer(f"{ANSWER}<|im_end|>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    whole = torch.cat([sent["input_ids"], answer], 1)
    labels = whole.clone()
    labels[:, : len(ids)] = -100
    codebook, rng = Codebook(language), np.random.default_rng(2)
    token_of = {row: token for token, row in codebook.rows.items()}
    crowds = [imagined(rng) for _ in range(60)]
    spelled = [
        language.tokenizer.decode([token_of[row] for row in codebook.sentence(people).tolist() if row in token_of])
        for people in crowds
    ]
    kinds = {codebook.rows[language.tokenizer.encode(f" {kind}", add_special_tokens=False)[0]] for kind in LOWER_KINDS}
    kind_places = {
        place for people in crowds for place, row in enumerate(codebook.sentence(people).tolist()) if row in kinds
    }
    places = codebook.entropies(np.random.default_rng(3), sentences=300)
    few = thinned(layout, frozenset(range(70, 80)))
    with torch.no_grad():
        images = tower.connector(tower.spelled(tower.seen(tiles))).reshape(1, -1, 576)
        mine = language.loss(images, layout, DEFAULT_PROMPT, [ANSWER])
        theirs = model(
            input_ids=whole,
            attention_mask=torch.ones_like(whole),
            pixel_values=sent["pixel_values"],
            pixel_attention_mask=sent["pixel_attention_mask"],
            labels=labels,
        ).loss
        tower.begin_spelling()
        seen = tower.norm(tower.seen(tiles[-1:]))
        attention = tower.vision_model.encoder.layers[LOOKING_LAYERS].self_attn
        queries, keys = (project(seen)[0, :, : attention.head_dim] for project in (attention.q_proj, attention.k_proj))
        looked = (queries @ keys.T * attention.scale).softmax(-1)
        asked = tower.attention(seen).softmax(1)[0, :, 0]
    print(
        json.dumps(
            {
                "lost_in_export": lost_in_export(checkpoint),
                "looks_elsewhere": float((looked - asked).abs().sum(-1).max()),
                "telling_places": (places > 0).nonzero().flatten().tolist(),
                "kinds": len(kinds),
                "kind_places": sorted(kind_places),
                "opened": {name: _opened(codebook, crowds[0], name) for name in ("top", "lower", "lower_kind", "stop")},
                "said_places": sum(WIDTHS),
                "same_ids": ids[before : before + layout.length] == list(layout.ids),
                "prompt_tokens": len(ids),
                "image_tokens": len(layout.slots),
                "pixel_difference": float((sent["pixel_values"][0] - pixels).abs().max()),
                "loss": float(mine),
                "transformers_loss": float(theirs),
                "spelled": [text.strip() for text in spelled],
                "said": [description(people) for people in crowds],
                "thinned_cells": list(few.cells),
                "thinned_positions": list(few.positions),
                "thinned_owners": sorted(set(few.owners)),
            }
        )
    )


if __name__ == "__main__":
    main()
