"""Planned interruptions of the model server: another token budget, or a comparison that needs the machine for itself.

Descriptions wait and none is lost, chat says why it has to wait, and everything goes on afterwards. The server belongs
to whoever started us (`framechat up`); what we want of it goes through :mod:`serving.wish`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from pipeline.api_compare import BudgetView, ChangeState, ChangeView
from pipeline.camera import CameraWorker
from pipeline.chat import Chat
from pipeline.errors import ApiError
from pipeline.runtime import Runtime
from pipeline.serverwatch import STATUS_FILE_VARIABLE
from serving.records import now_s
from serving.scheduler.control import BudgetRefusedError, SchedulerControl, SchedulerControlError
from serving.status import read_status
from serving.wish import RENEW_S, Reply, Wish, read_reply, reply_path, wish_path, with_budget, write

_log = logging.getLogger(__name__)
_POLL_S = 0.25
_DRAIN_S = 60.0
_BACK_S = 10.0
_STOP_MARGIN_S = 60.0


class Maintenance:
    """At most one interruption at a time. Belongs to one event loop."""

    def __init__(self, runtime: Runtime, chat: Callable[[], Chat]) -> None:
        self._runtime = runtime
        self._chat = chat
        file = os.environ.get(STATUS_FILE_VARIABLE)
        self._status_path = Path(file) if file else None
        self._control = SchedulerControl(self._status_path.parent) if self._status_path is not None else None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._renewed_enough = asyncio.Event()
        self._paused: list[CameraWorker] = []
        self._cameras_rest = False
        self._lent_with: int | None = None
        self._reason = ""
        self.view = ChangeView(state="none", detail="", at_s=now_s())

    def why_not(self) -> str:
        """Why the model server cannot be used, for a user; empty while nothing is planned."""
        return f"{self._reason}; try again when it is over" if self._reason else ""

    def why_cameras_rest(self) -> str:
        """Why no camera may begin or go on now, for a user; empty when it may."""
        return f"cameras rest: {self.why_not()}" if self._cameras_rest else ""

    def why_no_restart(self) -> str:
        """Why the server cannot be stopped or restarted from here; empty when it can."""
        server = self._runtime.config.serving.server
        if server.base_url is not None:
            return f"the model server at {server.endpoint} is not ours: restart it where it was started"
        if self._status_path is None:
            return "the model server was not started with this service; start both with `framechat up`"
        return ""

    async def budget(self) -> BudgetView:
        """The budgets in force."""
        known = self._runtime.server.view.max_num_batched_tokens
        view = BudgetView(max_num_batched_tokens=known, why_no_restart=self.why_no_restart(), change=self.view)
        if self._control is None or view.why_no_restart:
            return view.model_copy(update={"why_no_step_budget": view.why_no_restart})
        try:
            state = await asyncio.to_thread(self._control.state)
        except SchedulerControlError as error:
            return view.model_copy(update={"why_no_step_budget": str(error)})
        return view.model_copy(
            update={
                "step_budget": state.step_budget,
                "configured": state.configured,
                "least": state.least,
                "most": state.most,
            }
        )

    async def set_step_budget(self, tokens: int | None) -> None:
        """Change the tokens of one step in the running server, at once; None: as it was started.

        Raises:
            ApiError: Not possible here or now, or the server refuses it.
        """
        self._check(restart=False)
        if self._control is None:
            raise ApiError(409, self.why_no_restart())
        try:
            await asyncio.to_thread(self._control.set_step_budget, tokens)
        except BudgetRefusedError as error:
            raise ApiError(422, f"step_budget: {error}") from None
        except SchedulerControlError as error:
            raise ApiError(409, str(error)) from None

    @property
    def run_folder(self) -> Path | None:
        """Where our running server keeps its step records and its control channel; None where it is not ours."""
        return None if self._status_path is None or self.why_no_restart() else self._status_path.parent

    @property
    def busy(self) -> bool:
        """An interruption is under way."""
        return bool(self._reason)

    def start_budget(self, max_num_batched_tokens: int) -> None:
        """Begin to restart the server with this budget: what runs is finished first.

        Raises:
            ApiError: Not possible here, or not now, or the server would refuse the budget.
        """
        self._check(restart=True)
        try:
            wanted = with_budget(self._runtime.config.serving.server, max_num_batched_tokens)
        except ValueError as error:
            raise ApiError(422, _refusal(error)) from None
        self._because(f"the model server is restarted with a budget of {wanted.max_num_batched_tokens} tokens")
        self._task = asyncio.get_running_loop().create_task(self._apply(max_num_batched_tokens))

    async def begin(self, reason: str, *, stop_server: bool) -> None:
        """Leave the machine to something else until `end`: cameras pause, and what runs is finished first.

        Args:
            reason: For the user, what goes on.
            stop_server: Our model server stops as well; otherwise it is left to whoever asked.

        Raises:
            ApiError: Not possible here or now, or the server's keeper did not do it. Everything goes on then.
        """
        self._check(restart=stop_server)
        self._because(reason)
        try:
            self._pause_cameras()
            await self._drain()
            if stop_server:
                await self._stop_server()
            else:
                self._lent_with = (await self.budget()).step_budget
            self._say("stopped" if stop_server else "lent", reason)
        except BaseException:
            await self.end()
            raise

    async def _stop_server(self) -> None:
        wish = self._wish(running=False)
        self._renewed_enough.clear()
        self._renewing = asyncio.get_running_loop().create_task(self._renew(wish))
        self._say("stopping", "the model server stops")
        reply = await self._answered(wish, _STOP_MARGIN_S + self._runtime.config.serving.server.shutdown_timeout_s)
        if reply.state != "done":
            raise ApiError(503, f"the model server could not be stopped: {reply.detail}")

    async def end(self) -> None:
        """Have the server run again as before, and everything go on."""
        try:
            if self._renewing is None:
                await self._restore_step_budget()
                self._say("done", "")
                return
            await self._stop_renewing(self._renewing)
            self._say("starting", "the model server starts again")
            wish = self._wish(running=True)
            await self._write(wish)
            reply = await self._answered(wish, self._start_timeout_s())
            self._say("done" if reply.state == "done" else "failed", reply.detail)
        except (ApiError, OSError) as error:
            self._say("failed", str(error))
        finally:
            self._go_on()

    async def _restore_step_budget(self) -> None:
        """Whoever had the server puts its step budget back, unless it was killed."""
        before, self._lent_with = self._lent_with, None
        if before is not None and self._control is not None:
            with contextlib.suppress(SchedulerControlError):  # a server that is gone comes back as configured
                if (await asyncio.to_thread(self._control.state)).step_budget != before:
                    await asyncio.to_thread(self._control.set_step_budget, before)

    async def close(self) -> None:
        """The service stops: whatever is under way is given up, and the keeper starts the server by itself."""
        for task in (self._task, self._renewing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # --- one interruption --------------------------------------------------------------------------------------------

    def _check(self, *, restart: bool) -> None:
        refusal = self.why_no_restart() if restart else ""
        if refusal:
            raise ApiError(409, refusal)
        if self.busy:
            raise ApiError(409, self.why_not())

    async def _apply(self, budget: int) -> None:
        try:
            await self._drain()
            wish = self._wish(running=True, budget=budget)
            self._say("restarting", "the model server is restarted")
            await self._write(wish)
            reply = await self._answered(wish, self._start_timeout_s())
            if reply.state == "done":
                self._say("done", f"the model server runs with a budget of {budget} tokens, {reply.detail}")
            else:
                self._say("failed", reply.detail)
        except (ApiError, OSError) as error:
            self._say("failed", str(error))
        finally:
            self._go_on()

    async def _drain(self) -> None:
        """Hold what is due; let what runs end, for a while; then take descriptions back and stop answers."""
        describer, chat = self._runtime.describer, self._chat()
        describer.hold(self._reason)
        if await self._until_idle(_DRAIN_S):
            return
        describer.take_back()
        chat.stop(self._reason)
        if not await self._until_idle(_BACK_S):
            _log.warning("%d descriptions and %d answers did not end in time", describer.running, chat.running)

    async def _until_idle(self, seconds: float) -> bool:
        deadline_s = now_s() + seconds
        while (left := self._runtime.describer.running + self._chat().running) and now_s() < deadline_s:
            self._say("draining", f"{left} running requests are finished first")
            await asyncio.sleep(_POLL_S)
        return not left

    def _wish(self, *, running: bool, budget: int | None = None) -> Wish:
        if self._status_path is None:
            raise RuntimeError("no keeper")
        if budget is None:
            status = read_status(self._status_path)
            budget = status.max_num_batched_tokens if status is not None else None
        return Wish(uuid.uuid4().hex, running, budget, self._reason, now_s())

    async def _write(self, wish: Wish) -> None:
        if self._status_path is not None:
            await asyncio.to_thread(write, wish_path(self._status_path), wish)

    async def _renew(self, wish: Wish) -> None:
        """Keep saying that the server is to stand still; without it, it comes back."""
        while not self._renewed_enough.is_set():
            await self._write(Wish(wish.wish_id, wish.running, wish.max_num_batched_tokens, wish.reason, now_s()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._renewed_enough.wait(), RENEW_S)

    async def _stop_renewing(self, renewing: asyncio.Task[None]) -> None:
        """Cancelled, it could leave a thread behind that writes the old wish over the next one."""
        self._renewed_enough.set()
        await asyncio.gather(renewing, return_exceptions=True)
        self._renewing = None

    async def _answered(self, wish: Wish, seconds: float) -> Reply:
        """The keeper's last word on a wish.

        Raises:
            ApiError: It did not come in time.
        """
        deadline_s = now_s() + seconds
        while self._status_path is not None and now_s() < deadline_s:
            reply = await asyncio.to_thread(read_reply, reply_path(self._status_path))
            if reply is not None and reply.wish_id == wish.wish_id and reply.state != "working":
                return reply
            status = await asyncio.to_thread(read_status, self._status_path)
            if self.view.state in ("restarting", "starting") and status is not None and status.state != "ready":
                self._say(self.view.state, status.detail)
            await asyncio.sleep(_POLL_S)
        raise ApiError(504, f"whoever keeps the model server did not answer within {seconds:.0f} s; see its log")

    def _start_timeout_s(self) -> float:
        """Twice a start, for one that fails is followed by going back to what ran before."""
        server = self._runtime.config.serving.server
        return 2 * server.startup_timeout_s + server.shutdown_timeout_s + _STOP_MARGIN_S

    def _because(self, reason: str) -> None:
        self._reason = self._runtime.notice = reason

    def _pause_cameras(self) -> None:
        self._cameras_rest = True
        for worker in self._runtime.cameras.values():
            if not (worker.paused or worker.ended):  # a file that has ended would be played again
                worker.pause(True)
                self._paused.append(worker)

    def _go_on(self) -> None:
        self._because("")
        self._cameras_rest = False
        self._runtime.describer.release()
        for worker in self._paused:
            worker.go_on()
        self._paused.clear()

    def _say(self, state: ChangeState, detail: str) -> None:
        self.view = ChangeView(state=state, detail=detail, at_s=now_s())


def _refusal(error: ValueError) -> str:
    """A validation error's own words, in one line."""
    words = [line.strip() for line in str(error).splitlines() if "allowed" in line]
    return (words[0] if words else " ".join(str(error).split())).removeprefix("Value error, ").split(" [type=")[0]
