"""The store of a process that is killed."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pipeline.config import StoreConfig
from pipeline.database import DATABASE_NAME
from pipeline.store import Store
from tests.unit.pipeline.test_store import JPEG, make_view


def _write_until_killed(folder: Path, acknowledged: Connection, start: int) -> None:
    store = Store(StoreConfig(folder=folder))
    for number in range(start, start + 100_000):
        store.add_description(make_view(number, text=f"person number {number}"), JPEG)
        acknowledged.send_bytes(str(number).encode())


def test_a_kill_at_any_moment_loses_nothing_stored(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.store"])
    chance = random.Random(5)
    stored: set[int] = set()
    for round_number in range(15):
        receiver, sender = context.Pipe(duplex=False)
        writer = context.Process(target=_write_until_killed, args=(tmp_path, sender, 1_000_000 * (round_number + 1)))
        writer.start()
        sender.close()
        if round_number % 5:  # every fifth is killed at any time after its start, the others while writing
            assert receiver.poll(30)
        time.sleep(chance.uniform(0, 0.08))
        writer.kill()
        writer.join(10)
        try:
            while True:
                stored.add(int(receiver.recv_bytes()))
        except EOFError:
            pass
    assert len(stored) > 15
    store = Store(StoreConfig(folder=tmp_path))
    assert store.check() == "ok"
    for number in stored:
        view = store.description(f"{number:032x}")
        assert view is not None
        path = store.thumbnail(view.description_id)
        assert path is not None
        assert path.read_bytes() == JPEG
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        found = connection.execute("SELECT count(*) FROM descriptions_text WHERE descriptions_text MATCH 'number'")
        assert found.fetchone()[0] >= len(stored)
    connection.close()
