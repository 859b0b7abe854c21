from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ui.cli import app

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
BY_HAND = ["--layers", "32", "--kv-heads", "32", "--head-size", "128", "--dtype", "fp16"]
LOAD = """
duration_s: 5
classes:
  camera: {arrivals: {rate_per_s: 2}, output: {mean: 10}, pictures: {}}
  chat: {arrivals: {rate_per_s: 2}, output: {mean: 10}}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_json(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture
def load(tmp_path: Path) -> str:
    path = tmp_path / "load.yaml"
    path.write_text(LOAD)
    return str(path)


def test_kv_of_a_shape_given_by_hand() -> None:
    found = run_json("kv", *BY_HAND, "--tokens", "4096", "--sequences", "1")
    assert found["kv_bytes"] == 2147483648


def test_kv_of_a_models_folder_and_what_fits(model: str) -> None:
    found = run_json("kv", model, "--tokens", "8192", "--memory-gib", "80", "--mix", "chat:1:400:200")
    assert found["bytes_per_token"] == 131072
    capacity = found["capacity"]
    assert capacity["memory"]["estimated"] == ["weights", "activation peak", "context, graphs"]
    assert capacity["tokens"] == int(capacity["blocks"] / 512 * 8192)
    assert capacity["mix"]["at_worst"] == (capacity["blocks"] - 1) // 38
    assert capacity["advice"][0]["after"] > capacity["advice"][0]["before"]


def test_kv_counts_pictures_by_the_models_own_rule(tmp_path: Path) -> None:
    text = {**LLAMA, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "idefics3",
                "scale_factor": 4,
                "text_config": text,
                "vision_config": {"image_size": 512, "patch_size": 16},
            }
        )
    )
    (tmp_path / "processor_config.json").write_text(
        json.dumps(
            {
                "image_processor": {
                    "image_processor_type": "Idefics3ImageProcessor",
                    "size": {"longest_edge": 2048},
                    "max_image_size": {"longest_edge": 512},
                }
            }
        )
    )
    found = run_json("kv", str(tmp_path), "--picture", "1280x720", "--every-s", "2", "--cameras", "4")
    assert (found["picture_tokens"], found["picture_tokens_per_s"]) == (13 * 64, 1664)


def test_kv_takes_the_cache_from_a_servers_log(model: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("INFO Available KV cache memory: 3.81 GiB")
    capacity = run_json("kv", model, "--tokens", "16", "--server-log", str(log))["capacity"]
    assert capacity["tokens"] == pytest.approx(31232, rel=0.002)
    assert capacity["memory"] is None


def test_kv_as_a_table(model: str) -> None:
    done = run("kv", model, "--memory-gib", "80", "--mix", "chat:1:400:200")
    assert done.exit_code == 0
    for words in ("131,072 bytes", "activation peak (estimated)", "requests of the mix at once", "cap the output"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--layers", "32"], "give MODEL, or all of", id="half a shape"),
        pytest.param(
            ["--layers", "0", "--kv-heads", "1", "--head-size", "1", "--dtype", "fp16"], "layers is 0", id="zero"
        ),
        pytest.param(["--layers", "1", "--kv-heads", "1", "--head-size", "1"], "--dtype", id="no dtype"),
        pytest.param(["nowhere"], "no folder and no file", id="no such model"),
        pytest.param([*BY_HAND, "--memory-gib", "80"], "--weights-gib", id="weights unknown"),
        pytest.param([*BY_HAND, "--picture", "large"], "WIDTHxHEIGHT", id="no picture size"),
        pytest.param([*BY_HAND, "--tokens", "0"], "tokens is 0", id="no tokens"),
        pytest.param(
            [*BY_HAND, "--memory-gib", "80", "--weights-gib", "1", "--activation-gib", "1", "--mix", "chat"],
            "NAME:SHARE:PROMPT:OUTPUT",
            id="no mix",
        ),
    ],
)
def test_kv_says_what_is_wrong_in_one_line(arguments: list[str], message: str) -> None:
    done = run("kv", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_simulate_a_gpu_from_its_roofline(model: str, load: str) -> None:
    found = run_json("simulate", "--load", load, "--gpu", "h100", "--model", model, "--budgets", "128,1024")
    assert found["simulated"] is True
    assert "not measured" in found["step_time"]["source"]
    assert [row["budget"] for row in found["results"]] == [128, 1024]
    for row in found["results"]:
        assert set(row["classes"]) == {"camera", "chat"}
        camera = row["classes"]["camera"]
        assert camera["finished"] == camera["requests"] > 0
        assert 0 < camera["ttft"]["p50_ms"] <= camera["ttft"]["p95_ms"] <= camera["ttft"]["max_ms"]
        assert camera["itl"]["count"] == 9 * camera["requests"]


def test_simulate_from_a_fit_and_show_its_error(load: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "\n".join(
            f"Iteration({n}): 1 context requests, {64 * (n % 4)} context tokens, 2 generation requests, 2 generation "
            f"tokens, iteration elapsed time: {30 + 112 * (n % 4)}.00 ms"
            for n in range(80)
        )
    )
    done = run("simulate", "--load", load, "--fit", str(log), "--cache-tokens", "20000", "--policy", "decode-first")
    assert done.exit_code == 0, done.output
    assert "Fit error on steps left out of it (80 steps in all)" in done.stdout
    assert "taken as free: decode_context" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "either --fit", id="no step times"),
        pytest.param(["--gpu", "h9000"], "GPU 'h9000' is not known", id="unknown GPU"),
        pytest.param(["--fit", "nowhere"], "is not there", id="no such steps"),
        pytest.param(["--gpu", "h100", "--budgets", "many"], "whole numbers", id="no budgets"),
        pytest.param(["--gpu", "h100", "--policy", "fair"], "fair", id="unknown policy"),
        pytest.param(["--gpu", "h100", "--load", "nowhere.yaml"], "nowhere.yaml", id="no load"),
        pytest.param(["--check"], "--check needs --fit DIR", id="nothing to check"),
        pytest.param(["--gpu", "h100", "--fit-arms", "64"], "goes with --check", id="arms without a check"),
        pytest.param(["--check", "--fit", "nowhere", "--fit-arms", "64"], "holds no comparison", id="no comparison"),
    ],
)
def test_simulate_says_what_is_wrong_in_one_line(model: str, arguments: list[str], message: str) -> None:
    done = run("simulate", "--model", model, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_faulty_load_names_its_fault(model: str, tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text("classes: {chat: {speed: 3}}")
    done = run("simulate", "--model", model, "--gpu", "h100", "--load", str(path))
    assert done.exit_code == 2
    assert "load.yaml: classes.chat.speed" in done.stderr


def test_a_simulation_becomes_a_comparisons_folder_and_is_checked(model: str, load: str, tmp_path: Path) -> None:
    folder = tmp_path / "predicted"
    asked = ["--model", model, "--load", load, "--budgets", "64,256,1024"]
    done = run("simulate", *asked, "--gpu", "h100", "--report", str(folder))
    assert done.exit_code == 0, done.output
    assert "Simulated, not measured" in (folder / "report.html").read_text()
    again = run("simulate", *asked, "--gpu", "h100", "--report", str(folder))
    assert again.exit_code == 2
    assert "is not empty" in again.stderr
    cache = ["--model", model, "--cache-tokens", "20000"]
    found = run_json("simulate", "--fit", str(folder), "--fit-arms", "64,1024", "--check", *cache)
    unseen = [row for row in found["figures"] if not row["fitted"]]
    assert {row["arm"] for row in unseen} == {"256 simulated"}
    assert all(row["predicted_ms"] > 0 for row in unseen)
    shown = run("simulate", "--fit", str(folder), "--fit-arms", "64,1024", "--check", *cache)
    assert "Predicted and measured" in shown.stdout
    assert "of arms that were not fitted are within 9%" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "either --fit", id="no step times"),
        pytest.param(["--gpu", "h100", "--policy", "fair"], "fair", id="unknown policy"),
        pytest.param(["--gpu", "h100", "--budget", "0"], "1 or more", id="no budget"),
        pytest.param(["--gpu", "h100", "--most-waiting", "0"], "--most-waiting is 0", id="no queue"),
    ],
)
def test_mock_says_what_is_wrong_in_one_line(model: str, arguments: list[str], message: str) -> None:
    done = run("mock", "--model", model, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
