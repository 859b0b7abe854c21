"""Read measured steps for a fit: a comparison's steps.parquet, or a server's log with its own account of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.steplog import parse_step
from serving.steptime import FEATURE_NAMES, FitError, StepTime, fit_steps

STEPS_FILE = "steps.parquet"


def fit_from(path: Path) -> StepTime:
    """Fit step times from a folder with a steps.parquet, from such a file, or from a vLLM log.

    A log names no context lengths, so a fit from one has no attention terms and says so.

    Raises:
        FitError: There is no such file, it cannot be read, or it holds too few steps.
    """
    file = path / STEPS_FILE if path.is_dir() else path
    if not file.is_file():
        raise FitError(f"{file} is not there; give a folder with a {STEPS_FILE}, a .parquet file or a vLLM log")
    table = _read_parquet(file) if file.suffix == ".parquet" else _read_log(file)
    return fit_steps(table, source=f"fitted to {file.name}")


def _read_parquet(file: Path) -> Mapping[str, npt.NDArray[Any]]:
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only for this kind
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        table = pq.read_table(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise FitError(f"{file.name} is no parquet file: {error}") from None
    wanted = ("duration_s", *FEATURE_NAMES[1:])
    return {name: table.column(name).to_numpy() for name in wanted if name in table.column_names}


def _read_log(file: Path) -> Mapping[str, npt.NDArray[Any]]:
    with file.open(errors="replace") as lines:
        steps = [step for line in lines if (step := parse_step(line)) is not None and not step.dummy]
    if not steps:
        raise FitError(f"{file.name} has no step lines; start the server with log_steps: true")
    return {
        "duration_s": np.array([step.elapsed_ms / 1e3 for step in steps]),
        "decode_tokens": np.array([step.decode_tokens for step in steps]),
        "prefill_tokens": np.array([step.prefill_tokens for step in steps]),
        "encoder_tokens": np.array([step.encoder_tokens for step in steps]),
        "encoder_items": np.array([step.encoder_inputs for step in steps]),
    }
