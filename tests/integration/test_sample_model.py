"""The sample VLM says the same served and through transformers, and chats as its language model does alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from samples.training.facts import PROMPTS, QUESTIONS, read_facts
from samples.vlm import ensure_checkpoint, server_python
from tests.integration.served import ServedModel

pytestmark = pytest.mark.integration
_PROJECT = Path(__file__).parents[2]
_COUNT = 3


def run(*words: str) -> str:
    """What a program says in the server's environment, where transformers lives."""
    environment = os.environ | {"PYTHONPATH": str(_PROJECT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    command = [str(server_python()), "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def comparison(model_server: ServedModel) -> str:
    """What `evaluate served` prints about the running server."""
    return run("samples.training.evaluate", "served", model_server.endpoint, "--count", str(_COUNT))


def test_the_served_model_describes_pictures_as_transformers_does(comparison: str) -> None:
    assert f"| same description | {_COUNT}/{_COUNT} |" in comparison, comparison


def test_text_chat_is_the_language_model_s_own(comparison: str) -> None:
    row = f"| same chat answer with and without the vision part | {_COUNT}/{_COUNT} |"
    assert row in comparison, comparison


@pytest.mark.parametrize(("tiles", "least"), [("1 tile", 64), ("9 tiles", 576), ("17 tiles", 1088)])
def test_a_picture_costs_its_tiles(comparison: str, tiles: str, least: int) -> None:
    found = re.search(rf"\| {tiles} \| (\d+) prompt tokens \|", comparison)
    assert found, comparison
    assert least < int(found.group(1)) < least + 120


def test_every_phrasing_and_question_is_answered() -> None:
    printed = run("samples.training.evaluate", "questions", "--count", "8", "--show", "0")
    rows = re.findall(r"^\| (.+?) \| (\d+)/(\d+) \|", printed, re.MULTILINE)
    shares = {asked: int(right) / int(known) for asked, right, known in rows}
    assert set(shares) == {*PROMPTS, *QUESTIONS}, printed
    for asked in ("How many people?", "What colour is the top?"):
        assert shares[asked] >= 0.6, printed


@pytest.mark.parametrize("how", ["--frames", "--one-tile"])
def test_other_ways_to_show_a_picture_are_described_in_the_same_form(how: str) -> None:
    printed = run("samples.training.evaluate", "scenes", how, "--count", "6", "--show", "6")
    said = re.findall(r"^scene \d+: (.+)$", printed, re.MULTILINE)
    assert len(said) == 6, printed
    assert [text for text in said if read_facts(text).count is None] == []
    (people, tops) = (re.search(rf"^\| {kind} \| (\d+)/(\d+)", printed, re.MULTILINE) for kind in ("count", "top"))
    for found in (people, tops):
        assert found, printed
        assert int(found.group(1)) >= 0.5 * int(found.group(2)), printed


def test_the_checkpoint_names_no_place_of_the_machine_that_built_it() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in ensure_checkpoint().glob("*.json")}
    assert "config.json" in texts
    places = [str(_PROJECT), "site-packages", str(Path.home())]
    assert [(name, place) for name, text in texts.items() for place in places if place in text] == []


def test_training_sees_what_the_product_sends() -> None:
    found = json.loads(run("tests.integration.training_layout").splitlines()[-1])
    assert found["same_ids"]
    assert (found["prompt_tokens"], found["image_tokens"]) == (637, 576)
    assert found["pixel_difference"] == 0
    assert found["loss"] == pytest.approx(found["transformers_loss"], abs=1e-3)
    assert found["lost_in_export"] < 2**-8  # bfloat16
    assert found["spelled"] == found["said"]
    assert len(set(found["said"])) > 40
    assert found["looks_elsewhere"] < 0.2  # of 1 that a patch's attention gives to all
    assert (found["kinds"], found["kind_places"]) == (3, [18])
    assert found["opened"] == {"top": [*range(10, 15)], "lower": [*range(15, 19)], "lower_kind": [16, 18], "stop": [34]}
    assert {0, 12, 17, 22, 27} < set(found["telling_places"]) < set(range(found["said_places"]))
    assert found["thinned_cells"] == list(range(70, 80))
    assert found["thinned_owners"] == [1]
    # Tile 1 follows tile 0 (2 marks, 64 cells) with 2 marks of its own, and ends its row with a new line.
    assert found["thinned_positions"] == [66, 67, *range(74, 84), 132]
