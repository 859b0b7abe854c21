from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.childprocess import LOG_FOLDER_VARIABLE
from pipeline.config import Config
from pipeline.watch import run_watch
from tests.answering import answering, free_port, pages
from tests.component.pipeline.conftest import ColourDetector, ModelScript, wait_for, write_video
from tests.scripted_server import ScriptedServer

MakeConfig = Callable[..., Config]
KEYS = {
    "id", "state", "reason", "camera", "person", "track", "frame_s", "due_s", "sent_s", "first_token_s", "last_token_s",
    "text", "box", "thumbnail", "prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "model",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runtime.DetectorProcess", ColourDetector)
    monkeypatch.setattr("pipeline.watch._LOOK_S", 0.02)
    monkeypatch.setattr("pipeline.serverwatch._POLL_S", 0.1)


def watched(config: Config, video: Path, **source: Any) -> Config:
    camera = {"name": "Street", "source": str(video), "loop": True}
    return Config.model_validate(config.model_dump() | {"cameras": [camera], "source": source})


def test_one_line_and_one_object_a_description(
    make_config: MakeConfig, street_video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "people.jsonl"
    output.write_text("from an earlier run\n")
    assert run_watch(watched(make_config(), street_video), jsonl=output) == 0
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    assert "Street street-1: A red coat. [first token after " in line
    assert "1 people seen, 1 descriptions" in printed.err
    (found,) = (json.loads(item) for item in output.read_text(encoding="utf-8").splitlines())
    assert set(found) == KEYS
    assert (found["state"], found["text"], found["finish_reason"], found["model"]) == (
        "done", "A red coat.", "stop", "scripted",
    )  # fmt: skip
    assert found["frame_s"] <= found["due_s"] <= found["sent_s"] <= found["first_token_s"] <= found["last_token_s"]
    assert Path(found["thumbnail"]).read_bytes()[:2] == b"\xff\xd8"
    assert all(0 <= value <= 1 for value in found["box"])


@pytest.mark.parametrize(
    ("frames", "people", "count"),
    [
        pytest.param(170, {range(2 + 34 * turn, 11 + 34 * turn): 0 for turn in range(5)}, 5, id="one after the other"),
        # The end of the file decides on all of them at once; a frame apart, for they are keys.
        pytest.param(30, {range(12 + number): 60 * number - 55 for number in range(4)}, 4, id="all together"),
    ],
)
def test_as_fast_as_possible_loses_nobody(
    make_config: MakeConfig, tmp_path: Path, script: ModelScript, frames: int, people: dict[range, int], count: int
) -> None:
    """More people than may wait come by faster than they are described: reading waits instead, and so do they."""
    video = write_video(tmp_path / "many.avi", frames=frames, people=people)
    script.words, script.gap_s = ["ok"], 0.02
    limits = {"max_in_flight": 1, "max_waiting": 1, "reentry_window_s": 0, "confirm_detections": 2}
    config = watched(make_config(trigger=limits, detect={"rate_hz": 20}), video, as_fast_as_possible=True)
    output = tmp_path / "out.jsonl"
    assert run_watch(config, jsonl=output) == 0
    found = [json.loads(item) for item in output.read_text(encoding="utf-8").splitlines()]
    assert [item["state"] for item in found] == ["done"] * count
    assert len({item["person"] for item in found}) == count


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        pytest.param("/no/such/video.mp4", 2, "no such file", id="no file"),
        pytest.param("ftp://somewhere/x", 2, "ftp:// is not read", id="no such kind"),
    ],
)
def test_sources_that_cannot_work(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str], source: str, code: int, words: str
) -> None:
    assert run_watch(watched(make_config(), Path("x")).with_source(source)) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("framechat: ")
    assert words in errors[0]


def test_a_file_that_is_no_video_fails(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video" * 1000)
    config = watched(make_config(), broken)
    config = config.model_copy(update={"source": config.source.model_copy(update={"reconnect_backoff_s": 0.1})})
    assert run_watch(config) == 1
    assert "camera Street: " in capsys.readouterr().err


def test_an_output_that_cannot_be_written(make_config: MakeConfig, street_video: Path, tmp_path: Path) -> None:
    assert run_watch(watched(make_config(), street_video), jsonl=tmp_path) == 2


def test_an_unreachable_server_is_told_at_once(street_video: Path, tmp_path: Path) -> None:
    config = Config.model_validate(
        {"serving": {"server": {"base_url": "http://127.0.0.1:9/v1"}}, "store": {"folder": str(tmp_path)}}
    )
    assert run_watch(watched(config, street_video)) == 3


def test_a_server_of_ours_that_does_not_start_is_a_failed_part_with_its_last_lines(
    street_video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho loading\necho 'ValueError: not enough memory' >&2\nexit 1\n")
    python.chmod(0o755)
    server = {"python": str(python), "port": free_port(), "model": "stand-in"}
    folders = {"store": {"folder": str(tmp_path / "data")}, "run_folder": str(tmp_path / "runs")}
    config = Config.model_validate({"serving": {"server": server}, **folders})
    assert run_watch(watched(config, street_video)) == 1
    log = (tmp_path / "runs" / "latest").resolve() / "model-server.log"
    errors = capsys.readouterr().err
    assert "framechat: the model server ended with exit code 1: ValueError: not enough memory\n" in errors
    assert errors.endswith(f"Last lines of {log}:\n  loading\n  ValueError: not enough memory\n")


def test_a_server_of_somebody_elses_that_refuses_is_exit_code_3(
    make_config: MakeConfig, street_video: Path, script: ModelScript, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(pages({}, key="another")) as url:
        config = make_config(serving={"server": {"base_url": f"{url}/v1"}})
        assert run_watch(watched(config, street_video)) == 3
    assert "refuses the API key" in capsys.readouterr().err


def test_a_run_has_a_folder_as_any_other(
    make_config: MakeConfig, street_video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(serving={"server": {**make_config().serving.server.model_dump(), "served_model_name": "mine"}})
    assert run_watch(watched(config, street_video)) == 0
    folder = (tmp_path / "runs" / "latest").resolve()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "config.yaml").is_file()
    assert (folder / "reader-street.log").is_file()
    assert LOG_FOLDER_VARIABLE not in os.environ
    errors = capsys.readouterr().err
    assert f"Logs: {folder}" in errors
    assert f"using the model server at {config.serving.server.endpoint}: OpenAI-compatible server with mine" in errors


def test_a_run_folder_that_cannot_be_made_fails_in_one_line(
    make_config: MakeConfig, street_video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    config = make_config(run_folder=str(tmp_path / "file"))
    assert run_watch(watched(config, street_video)) == 1
    assert "set run_folder" in capsys.readouterr().err.splitlines()[-1]


def test_when_every_description_fails_so_does_the_run(
    make_config: MakeConfig, street_video: Path, script: ModelScript, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.scripted_server import problem

    script.refusal = problem(400, {"error": {"message": "no pictures here"}})
    config = make_config(trigger={"retry_after_s": 60})
    assert run_watch(watched(config, street_video)) == 1
    assert "(failed: " in capsys.readouterr().out


def test_ctrl_c_ends_in_order(
    make_config: MakeConfig,
    street_video: Path,
    tmp_path: Path,
    script: ModelScript,
    model_server: ScriptedServer,
) -> None:
    script.words, script.gap_s = ["slow "] * 100, 0.2

    def interrupt() -> None:
        wait_for(lambda: any(item.path == "/v1/chat/completions" for item in model_server.received))
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    output = tmp_path / "out.jsonl"
    assert run_watch(watched(make_config(), street_video), jsonl=output) == 130
    killer.join()
    (found,) = (json.loads(item) for item in output.read_text(encoding="utf-8").splitlines())
    assert (found["state"], found["reason"]) == ("cancelled", "the service stops")
    (asked,) = [item for item in model_server.received if item.path == "/v1/chat/completions"]
    assert asked.gone.wait(5)
