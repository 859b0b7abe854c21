"""Why the newest stalls happened, from the engine's own step records; with a server of ours only."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict, deque
from dataclasses import replace
from pathlib import Path

from pipeline.api import StallView
from pipeline.config import Config
from pipeline.serverwatch import STATUS_FILE_VARIABLE
from serving.compare.attribution import WORTH, Attribution, Part, attribute_stalls, in_words
from serving.compare.tables import RequestRow, StepRow, request_row
from serving.latency import Ledger
from serving.records import RequestRecord, now_s
from serving.scheduler.steps import StepFileError, StepReader
from serving.workload import PlannedRequest

_log = logging.getLogger(__name__)
_EVERY_S = 1.0
_WRITTEN_S = 0.5  # by then the engine has written a request's last step
_STEPS_KEPT = 5000
_CLASSES_KEPT = 1000
_STALLS_KEPT = 5
_PENDING_KEPT = 100


def run_folder() -> Path | None:
    """The folder of the run that this process is part of; None where it stands alone."""
    file = os.environ.get(STATUS_FILE_VARIABLE)
    return Path(file).parent if file else None


class StallCauses:
    """Reads steps as they come, and attributes the stalls of each request once it has ended.

    Args:
        ledger: Knows the class of requests that are still on their way.
        folder: The model server's run folder; None: there are no step records, and no stall has a cause.
    """

    def __init__(self, config: Config, ledger: Ledger, folder: Path | None) -> None:
        self._objectives_s = {name: one.itl_p99_ms / 1000 for name, one in config.serving.classes.items()}
        self._ledger = ledger
        self._folder = folder if config.serving.server.base_url is None else None
        self._reader: StepReader | None = None
        self._steps: deque[StepRow] = deque(maxlen=_STEPS_KEPT)
        self._pending: deque[RequestRow] = deque(maxlen=_PENDING_KEPT)
        self._classes: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self.newest: tuple[StallView, ...] = ()

    def observe(self, record: RequestRecord) -> None:
        """A request has ended. From any thread; returns at once."""
        objective_s = self._objectives_s.get(record.traffic_class)
        if self._folder is None or objective_s is None:
            return
        with self._lock:
            self._classes[record.request_id] = record.traffic_class
            while len(self._classes) > _CLASSES_KEPT:
                self._classes.popitem(last=False)
            if any(gap.duration_s > objective_s for gap in record.gaps):
                planned = PlannedRequest(0, record.traffic_class, 0.0, 0, 0)
                self._pending.append(
                    request_row(record, planned, block=0, arm="", image_tokens=0, warm_up=False, behind_cap_s=0.0)
                )

    async def run(self) -> None:
        """Keep `newest` up to date, for ever."""
        while self._folder is not None:
            try:
                await asyncio.to_thread(self.update, now_s())
            except StepFileError as error:
                _log.warning("stalls are shown without their causes from now on: %s", error)
                return
            await asyncio.sleep(_EVERY_S)

    def update(self, at_s: float) -> None:
        """Read new steps and attribute the stalls whose steps must be there by `at_s`. Blocks.

        Raises:
            StepFileError: The step file is not what the plugin writes.
        """
        if self._folder is None:
            return
        if self._reader is None:
            self._reader = StepReader(self._folder, from_now=True)
        self._steps.extend(self._reader.read())
        with self._lock:
            ready = [row for row in self._pending if row.finished_s <= at_s - _WRITTEN_S]
            for row in ready:
                self._pending.remove(row)
        if not ready:
            return
        found = [self._view(gap) for gap in attribute_stalls(ready, list(self._steps), self._objectives_s)]
        newest = sorted([*self.newest, *found], key=lambda stall: -stall.at_s)
        self.newest = tuple(newest[:_STALLS_KEPT])

    def _view(self, gap: Attribution) -> StallView:
        worth = [part for part in gap.parts if abs(part.duration_s) >= WORTH * gap.duration_s]
        main = gap.main
        return StallView(
            at_s=round(gap.end_s, 4),
            traffic_class=gap.traffic_class,
            request_id=gap.request_id,
            duration_ms=round(1000 * gap.duration_s, 3),
            cause=in_words(self._with_class(main)) if main is not None else (gap.missing or ""),
            parts=[in_words(self._with_class(part)) for part in worth],
        )

    def _with_class(self, part: Part) -> Part:
        if part.request_id is None or part.traffic_class is not None:
            return part
        known = self._classes.get(part.request_id) or self._ledger.traffic_class_of(part.request_id)
        return replace(part, traffic_class=known)
