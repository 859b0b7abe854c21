from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from pipeline.config import Config, ConfigError, load_config
from pipeline.runfolder import KEPT_RUNS, make_run_folder, write_config


def in_folder(folder: Path) -> Config:
    return load_config(None, overrides=[f"run_folder={folder}"], environ={})


def test_latest_points_to_the_newest(tmp_path: Path) -> None:
    config = in_folder(tmp_path / "runs")
    first = make_run_folder(config)
    second = make_run_folder(config)
    assert first != second
    assert (tmp_path / "runs" / "latest").resolve() == second
    assert stat.S_IMODE(second.stat().st_mode) == 0o700, "logs may quote what people typed"


def test_old_runs_are_thinned_out_and_nothing_else(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number in range(KEPT_RUNS + 5):
        (runs / f"20200101-0000{number:02d}").mkdir(parents=True)
        (runs / f"20200101-0000{number:02d}" / "config.yaml").touch()
    (runs / "mine").mkdir()
    (runs / "20190101-photos").mkdir()
    newest = make_run_folder(in_folder(runs))
    left = sorted(path.name for path in runs.iterdir())
    assert {"mine", "20190101-photos", "latest", newest.name} <= set(left)
    assert "20200101-000000" not in left
    assert f"20200101-0000{KEPT_RUNS + 4:02d}" in left
    assert len([name for name in left if name.startswith("20200101")]) == KEPT_RUNS


def test_a_run_that_goes_on_is_kept_however_many_began_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runfolder.KEPT_RUNS", 1)
    held: list[FileLock] = []
    monkeypatch.setattr("pipeline.runfolder._held", held)
    config = in_folder(tmp_path)
    long = make_run_folder(config)
    write_config(config, long)
    (tmp_path / "29990101-000000").mkdir()
    (tmp_path / "29990101-000000" / "config.yaml").touch()
    make_run_folder(config)
    assert long.exists()
    for lock in held:
        lock.release()  # as when the process ends
    make_run_folder(config)
    assert not long.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run_folder"):
        make_run_folder(in_folder(tmp_path / "file"))


def test_a_configuration_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be written"):
        write_config(Config(), tmp_path / "gone")


def test_the_written_configuration_is_the_one_in_force(tmp_path: Path) -> None:
    sample = Path(__file__).parents[3] / "configs" / "sample.yaml"
    config = load_config(sample, overrides=["serving.server.port=8123", "ui.port=8999"], environ={})
    path = write_config(config.with_source("sample-photos"), tmp_path)
    again = load_config(path, environ={})
    expected = config.with_source("sample-photos").model_dump()
    expected["serving"]["server"]["env"] = {}
    assert again.model_dump() == expected
    assert again.cameras[0].source == "sample-photos"


def test_no_secret_is_written(tmp_path: Path) -> None:
    config = load_config(
        None,
        overrides=["serving.server.env.HF_TOKEN=hf_s3cret", "serving.server.api_key_env=MY_KEY"],
        environ={"MY_KEY": "k3y"},
    )
    path = write_config(config, tmp_path)
    text = path.read_text()
    assert "s3cret" not in text
    assert "k3y" not in text
    assert yaml.safe_load(text)["serving"]["server"]["api_key_env"] == "MY_KEY"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
