"""The plugin's step files, read as rows of a comparison's step table while the engine goes on writing them.

The engine stamps with `time.monotonic()`, which all processes of a machine share; the rows are on `now_s()`'s clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.compare.tables import StepRow
from serving.records import monotonic_to_s
from serving.scheduler.plugin.framechat_scheduler.stepfile import FORMAT
from serving.scheduler.wiring import STEPS_NAME


class StepFileError(Exception):
    """A step file cannot be read; the message is one line."""


@dataclass(slots=True)
class _Part:
    """One file, as far as it was read."""

    path: Path
    offset: int = 0
    names: dict[str, str] | None = None


@dataclass(slots=True)
class StepReader:
    """Reads the steps of the server whose run folder is `folder`, each step once.

    `from_now` leaves out what was written before. `dropped` is how many steps the engine lost, in the file that was
    read last (a slow disk); `missed` counts files that were thinned out before they were read to their end.

    Raises:
        StepFileError: With `from_now`: the last file is not what the plugin writes.
    """

    folder: Path
    from_now: bool = False
    dropped: int = 0
    missed: int = 0
    _part: _Part | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.from_now:
            self._skip()

    def read(self, *, block: int = 0, arm: str = "") -> list[StepRow]:
        """The steps written since the last call, in order; `step` counts on from 0 with each reader.

        The plugin writes a step within about 0.1 s of its end. Empty while there is no file.

        Raises:
            StepFileError: A file is not what the plugin writes.
        """
        rows = []
        for values, names in self._lines():
            try:
                rows.append(self._row(values, names, block, arm))
            except (ValueError, TypeError, LookupError):
                raise StepFileError(f"{self.folder / STEPS_NAME} holds {str(values)[:60]}, which is no step") from None
            self._number += 1
        return rows

    def _skip(self) -> None:
        """To the end of the last file; on the way only requests' numbers are taken."""
        parts = sorted((self.folder / STEPS_NAME).glob("steps-*.jsonl"))
        if not parts:
            return
        self._part = part = _Part(parts[-1])
        try:
            with part.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    part.offset += len(line)
                    if line.startswith(b"{"):
                        self._take(part, json.loads(line))
        except FileNotFoundError:
            self._part = None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StepFileError(f"{part.path} cannot be read ({error})") from error

    def _lines(self) -> Iterator[tuple[list[Any], dict[str, str]]]:
        parts = sorted((self.folder / STEPS_NAME).glob("steps-*.jsonl"))
        if self._part is not None:
            if self._part.path not in parts:
                self.missed += 1
            parts = [path for path in parts if path >= self._part.path]
        for path in parts:
            if self._part is None or path != self._part.path:
                self._part = _Part(path)
            yield from self._rest(self._part)

    def _rest(self, part: _Part) -> Iterator[tuple[list[Any], dict[str, str]]]:
        try:
            with part.path.open("rb") as file:
                file.seek(part.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # half a line: the next call reads it whole
                    part.offset += len(line)
                    try:
                        step = self._take(part, json.loads(line))
                    except (ValueError, TypeError, LookupError):
                        raise StepFileError(f"{part.path} holds {line[:60]!r}, which is no step") from None
                    if step is not None:
                        yield step
        except FileNotFoundError:
            self.missed += 1
        except OSError as error:
            raise StepFileError(f"{part.path} cannot be read ({error.strerror})") from error

    def _take(self, part: _Part, value: Any) -> tuple[list[Any], dict[str, str]] | None:
        if part.names is None:
            if value["format"] != FORMAT:
                raise StepFileError(f"{part.path} has format {value['format']}, allowed: {FORMAT}")
            part.names = dict(value["names"])
            return None
        if isinstance(value, dict):
            part.names.update(value["names"])
            return None
        self.dropped = int(value[-1])
        return value, part.names

    def _row(self, values: list[Any], names: dict[str, str], block: int, arm: str) -> StepRow:
        start_s, end_s, duration_s, budget, features, counts, usage, requests, encoded, _ = values
        decode, prefill, decode_context, pairs, prefill_context, encoder_tokens, encoder_items = features
        running, waiting, preempted = counts
        return StepRow(
            block=block,
            arm=arm,
            step=self._number,
            start_s=monotonic_to_s(start_s),
            end_s=monotonic_to_s(end_s),
            duration_s=duration_s,
            budget=budget,
            decode_tokens=decode,
            prefill_tokens=prefill,
            decode_context=decode_context,
            prefill_pairs=pairs,
            prefill_context=prefill_context,
            encoder_tokens=encoder_tokens,
            encoder_items=encoder_items,
            running=running,
            waiting=waiting,
            preempted=preempted,
            kv_cache_usage=usage,
            request_ids=tuple(names[str(name)] for name, *_ in requests),
            request_tokens=tuple(tokens for _, tokens, _, _ in requests),
            request_prefill=tuple(bool(prompt) for _, _, prompt, _ in requests),
            request_outputs=tuple(out for *_, out in requests),
            encoder_request_ids=tuple(names[str(name)] for name, *_ in encoded),
            encoder_request_tokens=tuple(tokens for _, tokens, _ in encoded),
        )
