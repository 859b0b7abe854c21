"""A stand-in for whoever keeps the model server: reads the service's wishes from their file and answers them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.records import now_s
from serving.status import ServerStatus, State, write_status
from serving.wish import Reply, Wish, read_wish, reply_path, wish_path, write


class Keeper:
    """Answers every new wish at once, in a thread, unless told otherwise.

    Attributes:
        wishes: All that were asked, in order.
        hold: While set, wishes are read and not answered.
        refuse: Why it fails the next ones; empty: it does not.
        on_wish: Called with each new wish before it is answered, e.g. to take the scripted server away.
    """

    def __init__(self, folder: Path, endpoint: str, on_wish: Callable[[Wish], None] = lambda _wish: None) -> None:
        self.status_path = folder / "server.json"
        self.wishes: list[Wish] = []
        self.hold = threading.Event()
        self.refuse = ""
        self.renewals = 0
        self._endpoint = endpoint
        self._on_wish = on_wish
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self.status_path.parent.mkdir(parents=True, exist_ok=True)
        self._status("ready", 256)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(5)

    def _work(self) -> None:
        answered = ""
        latest: Wish | None = None
        while not self._end.wait(0.01):
            wish = read_wish(wish_path(self.status_path))
            if wish is None:
                continue
            if not self.wishes or wish.wish_id != self.wishes[-1].wish_id:
                self.wishes.append(wish)
                self._on_wish(wish)
            elif latest is not None and wish.at_s != latest.at_s:
                self.renewals += 1
            latest = wish
            if answered == wish.wish_id or self.hold.is_set():
                continue
            answered = wish.wish_id
            if not self.refuse:
                self._status("ready" if wish.running else "down", wish.max_num_batched_tokens)
            state = "failed" if self.refuse else "done"
            write(reply_path(self.status_path), Reply(wish.wish_id, state, self.refuse or "ready after 0 s"))

    def _status(self, state: State, budget: int | None) -> None:
        status = ServerStatus(
            state=state, detail="", endpoint=self._endpoint, attached=False, since_s=now_s(),
            max_num_batched_tokens=budget,
        )  # fmt: skip
        write_status(self.status_path, status)
