"""`framechat watch`: the pipeline without a page, one line a description."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from pipeline.addresses import mask_source
from pipeline.api import DescriptionView
from pipeline.childprocess import logs_in
from pipeline.config import Config, ConfigError
from pipeline.database import StoreError
from pipeline.feed import ACTIVE_STATES, Subscription
from pipeline.runfolder import MODEL_SERVER_LOG, make_run_folder, write_config
from pipeline.runtime import Runtime
from pipeline.serverwatch import api_headers
from pipeline.sourcecheck import check_source
from serving.attach import UnreachableError, describe_running
from serving.command import ServerError
from serving.server import ModelServer
from serving.status import ServerStatus

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130
_LOOK_S = 0.2
_PROGRESS_EVERY_S = 5.0
_TAIL_LINES = 12


def run_watch(config: Config, *, jsonl: Path | None = None) -> int:
    """Describe the people that `config`'s cameras see until their sources end, or until Ctrl-C.

    A file is played once. When nobody answers at the endpoint and the server is ours to start, one is started, and
    stopped at the end.

    Args:
        config: The deployment.
        jsonl: Written anew, one JSON object a description.

    Returns:
        The exit code: 0 done, 1 a source, every description or our own server failed, 2 wrong input, 3 somebody else's
        server cannot be used, 130 interrupted.
    """
    config = config.model_copy(
        update={"cameras": [camera.model_copy(update={"loop": False}) for camera in config.cameras]}
    )
    if not config.cameras:
        return _fail("there is no camera to watch; name a source", EXIT_USAGE)
    for camera in config.cameras:
        problem = check_source(camera)
        if problem is not None:
            return _fail(problem, EXIT_USAGE)
    try:
        output = jsonl.open("w", encoding="utf-8") if jsonl is not None else None
    except OSError as error:
        return _fail(f"{jsonl}: cannot be written ({error.strerror}); choose another --jsonl file", EXIT_USAGE)
    try:
        return asyncio.run(_Watch(config, output).run())
    except (ConfigError, StoreError) as error:
        return _fail(str(error), EXIT_FAILED)
    finally:
        if output is not None:
            output.close()


def _fail(message: str, code: int) -> int:
    print(f"framechat: {message}", file=sys.stderr, flush=True)
    return code


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class _Watch:
    """One run."""

    def __init__(self, config: Config, output: IO[str] | None) -> None:
        self._config = config
        self._output = output
        self._stop = asyncio.Event()
        self._server: ModelServer | None = None
        self._last_progress = ("", 0.0)
        self._counts: dict[str, int] = {}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        work = loop.create_task(self._work())
        stopped = loop.create_task(self._stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        interrupted = self._stop.is_set() and not work.done()
        stopped.cancel()
        if interrupted:
            _note("stopping")
            work.cancel()
        try:
            return await work
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED

    async def _work(self) -> int:
        try:
            found = await self._find_server()
            folder = make_run_folder(self._config)
            write_config(self._config, folder)
            _note(f"Logs: {folder}")
            if not found:
                await self._start_server(folder)
        except ServerError as error:
            return self._without_server(error)
        except asyncio.CancelledError:
            await self._stop_server()
            raise
        with logs_in(folder):
            return await self._describe()

    async def _describe(self) -> int:
        keeper = asyncio.create_task(self._server.watch()) if self._server is not None else None
        runtime = Runtime(self._config)
        try:
            await runtime.start()
            with runtime.feed.listen() as subscription:
                try:
                    await self._watch(runtime, subscription)
                finally:
                    await runtime.stop()
                    self._tell(runtime, subscription)
            return self._outcome(runtime)
        finally:
            if keeper is not None:
                keeper.cancel()
            await self._stop_server()

    async def _watch(self, runtime: Runtime, subscription: Subscription) -> None:
        """Report until every source has ended and every description of it is done."""
        for camera in self._config.cameras:
            _note(f"watching {mask_source(camera.source)} as {camera.name}; Ctrl-C stops")
        warned: set[str] = set()
        while True:
            ended = all(worker.ended for worker in runtime.cameras.values())
            if ended and runtime.describer.pending() == 0:
                return
            await asyncio.sleep(_LOOK_S)
            self._tell(runtime, subscription)
            for warning in runtime.warnings():
                if warning not in warned:
                    warned.add(warning)
                    _note(f"warning: {warning}")

    def _tell(self, runtime: Runtime, subscription: Subscription) -> None:
        """Print and write every description that has ended."""
        for item in subscription.take():
            if item.kind != "description":
                continue
            view = DescriptionView.model_validate_json(item.json)
            if view.state in ACTIVE_STATES:
                continue
            self._counts[view.state] = self._counts.get(view.state, 0) + 1
            print(_line(view), flush=True)
            if self._output is not None:
                path = runtime.store.thumbnail(view.description_id)
                self._output.write(json.dumps(_as_object(view, path), ensure_ascii=False) + "\n")
                self._output.flush()

    def _outcome(self, runtime: Runtime) -> int:
        failures = [worker for worker in runtime.cameras.values() if worker.failure]
        for worker in failures:
            _fail(f"camera {worker.camera.name}: {worker.failure}", EXIT_FAILED)
        seen = sum(worker.view().people_seen for worker in runtime.cameras.values())
        done = self._counts.get("done", 0)
        others = ", ".join(f"{count} {state}" for state, count in sorted(self._counts.items()) if state != "done")
        _note(f"{seen} people seen, {done} descriptions" + (f" ({others})" if others else ""))
        nothing = bool(self._counts) and done == 0
        return EXIT_FAILED if failures or nothing else EXIT_DONE

    # --- the model server --------------------------------------------------------------------------------------------

    async def _find_server(self) -> bool:
        """Whether a server answers; when not, ours is to be started.

        Raises:
            ServerError: Nobody answers and it is not ours to start, or it cannot be used.
        """
        server = self._config.serving.server
        key, _ = api_headers(self._config)
        try:
            running = await describe_running(server.endpoint, key, model=server.served_model_name)
        except UnreachableError as error:
            if server.base_url is not None:
                raise ServerError(f"{error}; start it, or leave out --server-url") from error
            return False
        _note(f"using the model server at {server.endpoint}: {running.in_words()}")
        return True

    async def _start_server(self, folder: Path) -> None:
        """Start ours.

        Raises:
            ServerError: It does not start.
        """
        server = self._config.serving.server
        _note(f"no model server at {server.endpoint}: starting one")
        self._server = ModelServer(server, log_path=folder / MODEL_SERVER_LOG, on_state=self._progress)
        await self._server.start()
        await self._server.wait_ready()

    def _without_server(self, error: ServerError) -> int:
        """Say why, with what our own server said last."""
        server = self._server
        if server is None:
            attached = self._config.serving.server.base_url is not None
            return _fail(str(error), EXIT_UNREACHABLE if attached else EXIT_FAILED)
        _fail(str(error), EXIT_FAILED)
        if lines := server.log_tail(_TAIL_LINES):
            _note("\n  ".join([f"Last lines of {server.current_log}:", *lines]))
        return EXIT_FAILED

    def _progress(self, status: ServerStatus) -> None:
        text, at_s = self._last_progress
        now = time.monotonic()
        if status.detail != text or now - at_s >= _PROGRESS_EVERY_S:
            self._last_progress = (status.detail, now)
            _note(f"model server {status.state} ({status.elapsed_s:.0f} s): {status.detail}")

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.stop()


def _line(view: DescriptionView) -> str:
    """One description for the terminal."""
    at = time.strftime("%H:%M:%S", time.localtime(view.frame_s))
    if view.state != "done":
        return f"{at} {view.camera} {view.person_id}: ({view.state}: {view.reason})"
    ttft = "" if view.ttft_ms is None else f" [first token after {view.ttft_ms / 1000:.2f} s]"
    return f"{at} {view.camera} {view.person_id}: {' '.join(view.text.split())}{ttft}"


def _as_object(view: DescriptionView, thumbnail: Path | None) -> dict[str, Any]:
    """One description for the JSONL file. Times are seconds since the epoch, the box fractions of the frame."""
    return {
        "id": view.description_id,
        "state": view.state,
        "reason": view.reason,
        "camera": view.camera,
        "person": view.person_id,
        "track": view.track_id,
        "frame_s": view.frame_s,
        "due_s": view.due_s,
        "sent_s": view.sent_s,
        "first_token_s": view.first_token_s,
        "last_token_s": view.last_token_s,
        "text": view.text,
        "box": list(view.box),
        "thumbnail": None if thumbnail is None else str(thumbnail),
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "completion_tokens": view.completion_tokens,
        "finish_reason": view.finish_reason,
        "model": view.model,
    }
