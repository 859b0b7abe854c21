from __future__ import annotations

from pathlib import Path

import pytest

from serving.startup import LogFollower, cause_of, progress_of

API = "(APIServer pid=19604) INFO 11-29 18:09:09"


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        pytest.param(f"{API} [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0",
                     "vLLM 0.32.0: reading the settings", id="banner"),
        pytest.param(f"{API} [model.py:733] Resolved architecture: Idefics3ForConditionalGeneration",
                     "reading the model's description (Idefics3ForConditionalGeneration)", id="architecture"),
        pytest.param("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.28s/it]",
                     "loading weights: 50%", id="shards"),
        pytest.param(f"{API} [default_loader.py:501] Loading weights took 1.28 seconds",
                     "weights loaded in 1.28 s; preparing the KV cache", id="loaded"),
        pytest.param(f"{API} [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for 4,096",
                     "KV cache of 46,592 tokens; finishing", id="kv cache"),
        pytest.param("INFO:     Application startup complete.", "answering", id="up"),
        pytest.param(f"{API} [launcher.py:195] Route: /health, Methods: GET", None, id="nothing to say"),
    ],
)  # fmt: skip
def test_progress(line: str, progress: str | None) -> None:
    assert progress_of(line) == progress


ROOT = "(EngineCore pid=7) ERROR 11-29 18:09:09 [core.py:12] ValueError: No available memory for the cache blocks."
CONSEQUENCE = "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        pytest.param([], None, id="silence"),
        pytest.param(["INFO all is well"], None, id="no error"),
        pytest.param([ROOT, CONSEQUENCE], "ValueError: No available memory for the cache blocks.", id="root first"),
        pytest.param([CONSEQUENCE], "RuntimeError: Engine core initialization failed. See root cause above.",
                     id="nothing better"),
        pytest.param(["api_server.py: error: unrecognized arguments: --no-such-flag"],
                     "error: unrecognized arguments: --no-such-flag", id="argparse"),
        pytest.param(["(APIServer pid=1) ERROR 11-29 18:35:03 [async_llm.py:906] "
                      "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."],
                     "its engine process died", id="engine killed"),
        pytest.param(["  File \"x.py\", line 1, in f", "torch.OutOfMemoryError: CUDA out of memory."],
                     "torch.OutOfMemoryError: CUDA out of memory.", id="dotted name"),
    ],
)  # fmt: skip
def test_cause(lines: list[str], cause: str | None) -> None:
    assert cause_of(lines) == cause


def test_a_cause_is_one_short_line() -> None:
    assert len(cause_of(["ValueError: " + "x" * 10_000]) or "") <= 300


def test_follower_gives_whole_lines_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    follower = LogFollower(log)
    assert follower.lines() == []
    with log.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert follower.lines() == ["one"]
        file.write("o\r 50%\r100%\n\n")
        file.flush()
        assert follower.lines() == ["two", " 50%", "100%"]
    assert follower.lines() == []


def test_follower_of_a_file_that_comes_later(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path / "log")
    assert follower.lines() == []
    (tmp_path / "log").write_bytes(b"caf\xc3\xa9 \xff\n")
    assert follower.lines() == ["café �"]
