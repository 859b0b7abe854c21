"""The one thread that writes to the store, so that neither the event loop nor the client's clock waits for the disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline.api import DescriptionView
from pipeline.database import StoreError
from pipeline.store import Store
from serving.records import RequestRecord, now_s

_log = logging.getLogger(__name__)
_MAX_PENDING = 2000
SWEEP_EVERY_S = 60.0


class StoreWriter:
    """Writes in the order of the calls.

    Attributes:
        problem: Why the last write failed, one line; empty when it did not.
        lost: Request records and chat turns given up because the disk was too slow or refused.
    """

    def __init__(self, store: Store, on_record: Callable[[RequestRecord], None] | None = None) -> None:
        self.store = store
        self.problem = ""
        self.lost = 0
        self._on_record = on_record
        self._pending = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="framechat-store")

    async def description(self, view: DescriptionView, thumbnail: bytes | None) -> bool:
        """Store an ended description; False when that failed (`problem` says why)."""
        return await self.now(lambda: self.store.add_description(view, thumbnail))

    def request(self, record: RequestRecord) -> None:
        """Store a request record, soon. From any thread; returns at once."""

        def keep() -> None:
            if self._on_record is not None:
                self._on_record(record)
            self.store.add_request(record)

        self.later(keep)

    def later(self, write: Callable[[], None]) -> None:
        """Do any write, soon. From any thread; returns at once."""
        with self._lock:
            if self._pending >= _MAX_PENDING:
                self.lost += 1
                return
            self._pending += 1
        try:
            self._thread.submit(self._take, write)
        except RuntimeError:  # closed: what ends this late is not recorded
            self.lost += 1

    async def now(self, write: Callable[[], None]) -> bool:
        """Do any write and return when it is done; False when it failed (`problem` says why)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, write)

    def _take(self, write: Callable[[], None]) -> None:
        with self._lock:
            self._pending -= 1
        if not self._do(write):
            self.lost += 1

    def _do(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except Exception as error:  # whatever it is: who waits for this write is told, and the next one may work
            problem = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            if not self.problem:
                _log.error("%s", problem, exc_info=None if isinstance(error, StoreError) else error)
            self.problem = problem
            return False
        self.problem = ""
        return True

    async def keep_swept(self) -> None:
        """Apply the retention for ever, a bounded piece at a time."""
        loop = asyncio.get_running_loop()
        while True:
            more = False

            def sweep() -> None:
                nonlocal more
                more = self.store.sweep(now_s()).more

            await loop.run_in_executor(self._thread, self._do, sweep)
            await asyncio.sleep(1.0 if more else SWEEP_EVERY_S)

    def close(self) -> None:
        """Finish what is queued and close the store. Blocks."""
        self._thread.shutdown(wait=True)
        self.store.close()
