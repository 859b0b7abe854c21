"""Wishes for the model server's keeper: what is written is read, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.config import ServerConfig
from serving.records import now_s
from serving.wish import FORGOTTEN_S, Reply, Wish, read_reply, read_wish, reply_path, wish_path, with_budget, write


def wish(*, running: bool = True, age_s: float = 0.0) -> Wish:
    return Wish("w1", running, 512, "because", now_s() - age_s)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    status = tmp_path / "server.json"
    asked, answered = wish(), Reply("w1", "done", "ready after 3 s")
    write(wish_path(status), asked)
    write(reply_path(status), answered)
    assert read_wish(wish_path(status)) == asked
    assert read_reply(reply_path(status)) == answered


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"wish_id": "w1"}', '{"unknown": 1}'])
def test_what_cannot_be_read_is_no_wish(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "wish.json"
    if content is not None:
        path.write_text(content)
    assert read_wish(path) is None
    assert read_reply(path) is None


@pytest.mark.parametrize(
    ("running", "age_s", "forgotten"),
    [
        pytest.param(False, 0, False, id="to stand still, fresh"),
        pytest.param(False, FORGOTTEN_S + 1, True, id="to stand still, nobody renews it"),
        pytest.param(True, FORGOTTEN_S + 1, False, id="to run: needs no renewing"),
    ],
)
def test_only_standing_still_must_be_renewed(running: bool, age_s: float, forgotten: bool) -> None:
    assert wish(running=running, age_s=age_s).forgotten is forgotten


def test_smaller_limits_follow_the_budget() -> None:
    config = ServerConfig(max_num_batched_tokens=512, max_num_scheduled_tokens=256, long_prefill_token_threshold=128)
    changed = with_budget(config, 64)
    assert (changed.max_num_batched_tokens, changed.max_num_scheduled_tokens) == (64, 64)
    assert changed.long_prefill_token_threshold == 64
    assert with_budget(config, None) == config
    assert with_budget(changed, 512).long_prefill_token_threshold == 64  # what was lowered stays: ask from the original


def test_a_budget_that_the_server_would_refuse_is_refused_before() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        with_budget(ServerConfig(max_num_seqs=16), 8)
