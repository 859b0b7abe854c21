"""`framechat compare` as one types it: against a scripted server, and what it says to what cannot be."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pipeline.config import Config, load_config
from serving.compare.arms import check_arms, read_variants
from serving.compare.capacity import Capacity
from serving.compare.summary import Summary
from serving.compare.tables import read_experiment, read_results
from serving.config import ImageTokens
from serving.workload import draw
from tests.comparison_data import comparison
from tests.component.serving.compare.scripted_arms import Answer, playing
from tests.scripted_server import ScriptedServer
from ui.cli import app
from ui.cli_compare import _shown
from ui.plan_simulate import read_workload

CONFIGS = Path(__file__).parents[3] / "configs"
ANSWERS = {"camera": Answer(0.03, [0.05], [1]), "chat": Answer(0.02, [0.04, 0.04], [1, 2])}
LOAD = """
duration_s: 0.8
classes:
  camera: {arrivals: {process: constant, rate_per_s: 4}, output: {mean: 4}, pictures: {width_px: 32, height_px: 32}}
  chat: {arrivals: {process: constant, rate_per_s: 6}, output: {mean: 4}, prompt: {mean: 8}}
"""


def run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", "--set", f"comparisons.folder={tmp_path / 'kept'}", *arguments])


@pytest.fixture
def load(tmp_path: Path) -> str:
    path = tmp_path / "load.yaml"
    path.write_text(LOAD)
    return str(path)


@pytest.fixture
def picture(tmp_path: Path) -> str:
    from PIL import Image

    path = tmp_path / "one.png"
    Image.new("RGB", (50, 40), "green").save(path)
    return str(path)


def test_a_running_server_is_measured_as_it_is(tmp_path: Path, load: str, picture: str) -> None:
    with ScriptedServer(playing(ANSWERS)) as server:
        done = run(
            tmp_path, "--server-url", server.endpoint, "--load", load, "--rounds", "1", "--warm-up-s", "0",
            "--drain-s", "2", "--pictures", picture, "--name", "mine",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    folder = tmp_path / "kept" / "mine"
    for words in ("1 arm, 1 block of 0.8 s", "not ours to restart", "as it runs", "requests.parquet"):
        assert words in done.stdout
    assert {path.name for path in folder.iterdir()} >= {
        "experiment.json", "summary.json", "requests.parquet", "steps.parquet", "progress.json", "report.html",
        "blocks",
    }  # fmt: skip
    assert {row.outcome for row in read_results(folder).requests} == {"done"}
    assert read_experiment(folder).attached
    assert Summary.model_validate_json((folder / "summary.json").read_text()).complete
    again = run(tmp_path, "--server-url", server.endpoint, "--load", load, "--name", "mine")
    assert again.exit_code == 2
    assert "--resume mine" in again.stderr


def test_a_capacity_search_that_is_interrupted_keeps_what_it_found(tmp_path: Path, load: str, picture: str) -> None:
    folder = tmp_path / "kept" / "search"

    with ScriptedServer(playing(ANSWERS)) as server:

        def interrupt() -> None:
            deadline = time.monotonic() + 20
            while not (folder / "capacity.json").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        killer = threading.Thread(target=interrupt)
        killer.start()
        done = run(
            tmp_path, "--server-url", server.endpoint, "--load", load, "--find-capacity", "--warm-up-s", "0",
            "--drain-s", "2", "--pictures", picture, "--name", "search",
        )  # fmt: skip
    killer.join()
    assert done.exit_code == 130, done.output
    assert "Interrupted; go on with: framechat compare --find-capacity --resume search" in done.stdout
    assert (folder / "report.html").exists()
    kept = Capacity.model_validate_json((folder / "capacity.json").read_text())
    assert not kept.complete
    assert kept.arms[0].probes


def test_step_budgets_of_a_strange_server_are_refused_in_words(tmp_path: Path, load: str, picture: str) -> None:
    with ScriptedServer(playing(ANSWERS)) as server:
        done = run(
            tmp_path, "--server-url", server.endpoint, "--load", load, "--step-budgets", "64,128", "--rounds", "1",
            "--pictures", picture, "--name", "strange",
        )  # fmt: skip
    assert done.exit_code == 1
    assert "step 64 is refused: step budgets move through the scheduler plugin" in " ".join(done.stdout.split())


def test_a_report_is_drawn_again(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    comparison(folder, rounds=2, block_s=20, budgets=(64, 2048))
    done = run(tmp_path, "--from", str(folder))
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "summary.json").read_text())["name"] == "toy"
    assert (folder / "report.html").stat().st_size > 100_000
    assert "camera TTFT p95" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "nothing to compare", id="no arms"),
        pytest.param(["--budgets", "many"], "whole numbers", id="no numbers"),
        pytest.param(["--budgets", "64,64"], "every one once", id="twice"),
        pytest.param(["--step-budgets", "0"], "1 or more", id="zero"),
        pytest.param(["--variants", "nowhere.yaml"], "nowhere.yaml", id="no variants"),
        pytest.param(["--budgets", "64", "--load", "nowhere.yaml"], "nowhere.yaml", id="no load"),
        pytest.param(["--budgets", "64", "--name", "../x"], "--name is '../x'", id="a name that leaves the folder"),
        pytest.param(["--resume", "nothing"], "holds no comparison", id="nothing to resume"),
        pytest.param(["--from", "nowhere"], "holds no comparison", id="nothing to draw"),
        pytest.param(["--budgets", "64", "--rounds", "2", "--requests", "9"], "one of them", id="two lengths"),
        pytest.param(["--budgets", "64", "--warm-up-s", "99"], "less than a block", id="all warm-up"),
        pytest.param(["--budgets", "64", "--replay", "nowhere.jsonl"], "nowhere.jsonl", id="no trace"),
        pytest.param(["--budgets", "64", "--pictures", "nowhere"], "--pictures nowhere", id="no pictures"),
        pytest.param(["--budgets", "64", "--set", "serving.server.max_model_len=600"], "max_model_len", id="too long"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_class_that_the_deployment_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text("classes: {poem: {}}")
    done = run(tmp_path, "--budgets", "64", "--load", str(path))
    assert done.exit_code == 2
    assert "class poem" in done.stderr


def test_the_recorded_command_hides_the_servers_variables() -> None:
    argv = [
        "x",
        "compare",
        "--set",
        "serving.server.env.TOKEN=hush",
        "--set=serving.server.env={A: hush}",
        "--seed",
        "1",
    ]
    shown = " ".join(_shown(argv))
    assert "hush" not in shown
    assert shown.startswith("framechat compare --set serving.server.env.TOKEN=***")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("load-*.yaml")), ids=lambda path: path.name)
def test_the_loads_that_come_with_it_are_loads_of_known_classes(path: Path) -> None:
    workload = read_workload(path)
    assert set(workload.classes) <= set(Config().serving.classes)
    assert {request.traffic_class for request in draw(workload)} == set(workload.classes)


def test_the_variants_that_come_with_it_can_be_had() -> None:
    serving = load_config(CONFIGS / "sample.yaml").serving
    arms = check_arms(read_variants(CONFIGS / "variants-cpu.yaml"), serving)
    assert [arm.reason for arm in arms] == [None] * len(arms)


def test_the_cameras_pictures_of_the_cpu_load_are_about_a_thousand_tokens() -> None:
    (camera,) = {request.pictures for request in draw(read_workload(CONFIGS / "load-cpu.yaml")) if request.pictures}
    assert camera.tokens_each(ImageTokens()) == 17 * 64
