"""A deployment at work, without its HTTP API: cameras, describer, store, ledger and the model server's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.addresses import mask_source
from pipeline.api import AddCamera, CameraView, StatusView
from pipeline.camera import CameraWorker, camera_id_of
from pipeline.camerastore import CameraStore, StoredCamera
from pipeline.config import CameraConfig, Config
from pipeline.describer import Describer
from pipeline.detect import DetectorError, DetectorProcess, DetectorStatus
from pipeline.errors import ApiError
from pipeline.feed import Feed
from pipeline.figures import Figures
from pipeline.serverwatch import ServerWatch, api_headers
from pipeline.sourcecheck import check_source
from pipeline.stallcauses import StallCauses, run_folder
from pipeline.store import Store
from pipeline.traffic import Traffic
from pipeline.uploads import Uploads
from pipeline.writer import StoreWriter
from serving.client import ModelClient
from serving.latency import Ledger
from serving.records import now_s

_log = logging.getLogger(__name__)
_RECENT = 40
_THREADS = 24
_CHECK_S = 4.0  # a file system that does not answer holds up no other camera
_LEAVE_S = 10.0


class Runtime:
    """Everything that runs. Make it, `start` it, and `stop` it, all on one event loop.

    Args:
        keep_cameras: Cameras that are added and removed while running are remembered, and those of earlier runs come
            back; without it only the configuration's are watched.

    Raises (in `start`):
        StoreError: The store cannot be used.
    """

    def __init__(self, config: Config, *, keep_cameras: bool = False) -> None:
        self.config = config
        self._keep_cameras = keep_cameras
        self._stay_removed: list[str] = []
        self.started_s = now_s()
        self.feed = Feed()
        self.ledger = Ledger(config.serving.classes, config.service.latency_window_s)
        self.stalls = StallCauses(config, self.ledger, run_folder())
        self.figures = Figures(config, self.ledger, self.stalls, self.status)
        self.cameras: dict[str, CameraWorker] = {}
        self.uploads = Uploads(config)
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()  # for each camera that was removed and is not closed yet
        self._forgetting = asyncio.Lock()
        self._adding = asyncio.Lock()
        self._detector: DetectorProcess | None = None  # starts with the first camera
        self.notice = ""  # what everybody should know now, e.g. that a comparison runs

    async def start(self) -> None:
        """Open the store, start the cameras, look for the model server."""
        config = self.config
        # The default pool is as small as the machine; here threads mostly wait, and one that does must hold up nobody.
        pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="framechat-work")
        asyncio.get_running_loop().set_default_executor(pool)
        self.store = await asyncio.to_thread(Store, config.store)
        self.writer = StoreWriter(self.store, on_record=self.figures.observe)
        recent = await asyncio.to_thread(self.store.search, limit=_RECENT)
        self.feed.seed(list(reversed(recent)))
        key, headers = api_headers(config)
        server = config.serving.server
        self.client = ModelClient(
            server.endpoint,
            model=server.served_model_name,
            timeouts=config.serving.timeouts,
            api_key=key,
        )
        self.traffic = Traffic(self.client, self.ledger, self.writer.request)
        self.describer = Describer(config, self.traffic, self.writer, self.feed, ready=False)
        self.server = ServerWatch(config, self.describer.set_ready)
        self.api_headers = headers
        for work in (self.server.run(), self.stalls.run(), self.writer.keep_swept()):
            self._spawn(work, self._tasks)
        await self._start_cameras()

    async def stop(self) -> None:
        """End everything that was started; descriptions under way are cancelled and stored as such."""
        ends = [worker.close for worker in self.cameras.values()]
        if self._detector is not None:
            ends.append(self._detector.close)  # whoever waits for it is let go
        await asyncio.gather(self._left(), *(asyncio.to_thread(end) for end in ends))
        await self.describer.close("the service stops")
        tasks = [*self._tasks, *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        await self.server.close()
        await asyncio.to_thread(self.writer.close)

    # --- cameras -----------------------------------------------------------------------------------------------------

    async def add_camera(self, wanted: AddCamera) -> CameraView:
        """Start watching one more camera.

        Raises:
            ApiError: Too many cameras, a name in use, or a source that cannot work.
        """
        async with self._adding:
            if len(self.cameras) >= self.config.service.max_cameras:
                raise ApiError(409, f"{len(self.cameras)} cameras are watched, the most allowed; remove one first")
            names = {worker.camera.name for worker in self.cameras.values()}
            name = (wanted.name or "").strip() or _free_name(names)
            if name in names:
                raise ApiError(409, f"name: a camera called {name!r} exists; choose another name")
            try:
                camera = CameraConfig(**{**wanted.model_dump(), "source": wanted.source.strip(), "name": name})
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"])
                raise ApiError(422, f"{field}: {first['msg'].removeprefix('Value error, ')}") from None
            trouble = await _trouble(camera)
            if trouble:
                raise ApiError(422, trouble)
            worker = self._start_camera(camera)
            self._stay_removed = [gone for gone in self._stay_removed if gone != name]
            if self._keep_cameras:
                kept = StoredCamera(worker.camera_id, camera, removed=False)
                await self.writer.now(lambda: self._camera_store.keep(kept))
            return worker.view()

    async def _start_cameras(self) -> None:
        """Those of the configuration without those that were removed, then those that were added."""
        self._camera_store = CameraStore(self.store.database)
        stored = await asyncio.to_thread(self._camera_store.cameras) if self._keep_cameras else []
        removed = [one.camera for one in stored if one.removed]
        for camera in self.config.cameras:
            if camera in removed:
                self._stay_removed.append(camera.name)
            else:
                self._start_camera(camera)
        configured = {camera.name for camera in self.config.cameras}
        for one in stored:
            taken = one.camera_id in self.cameras or one.camera.name in configured
            if not (one.removed or taken) and len(self.cameras) < self.config.service.max_cameras:
                self._start_camera(one.camera, one.camera_id)
        if self._keep_cameras:
            sources = {camera.source for camera in self.config.cameras} | {one.camera.source for one in stored}
            await asyncio.to_thread(self.uploads.clear, sources)

    async def remove_camera(self, camera_id: str) -> None:
        """Stop watching a camera; what it has waiting or running is cancelled. It is closed in the background.

        Raises:
            ApiError: There is none of that id.
        """
        worker = self.camera(camera_id)
        del self.cameras[camera_id]
        worker.stop()  # before the cancellation: from here on the id is free for another camera
        self.describer.cancel(camera_id, None, "camera removed")
        self._spawn(self._let_go(worker), self._leaving)
        if self._keep_cameras:
            if worker.camera in self.config.cameras:
                gone = StoredCamera(camera_id, worker.camera, removed=True)
                await self.writer.now(lambda: self._camera_store.keep(gone))
            else:
                await self.writer.now(lambda: self._camera_store.forget(camera_id))
        if all(other.camera.source != worker.camera.source for other in self.cameras.values()):
            await asyncio.to_thread(self.uploads.remove, worker.camera.source)

    async def _let_go(self, worker: CameraWorker) -> None:
        """Free what a removed camera holds. Takes long where its reader hangs or the detector is starting."""
        await asyncio.to_thread(worker.close)
        if self._detector is not None:
            async with self._forgetting:  # at most one thread waits for the detector
                with contextlib.suppress(DetectorError):
                    await asyncio.to_thread(self._detector.forget, worker.detector_id)

    async def _left(self) -> None:
        """Wait for the cameras that were removed last, within bounds."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_LEAVE_S)

    def camera(self, camera_id: str) -> CameraWorker:
        """One camera.

        Raises:
            ApiError: There is none of that id.
        """
        worker = self.cameras.get(camera_id)
        if worker is None:
            raise ApiError(404, f"camera {camera_id[:64]!r} does not exist; GET /cameras lists them")
        return worker

    def _start_camera(self, camera: CameraConfig, camera_id: str | None = None) -> CameraWorker:
        base = camera_id = camera_id or camera_id_of(camera.name)
        number = 1
        while camera_id in self.cameras:
            number += 1
            camera_id = f"{base}-{number}"
        if self._detector is None:
            self._detector = DetectorProcess(self.config.detect)
        worker = CameraWorker(camera_id, camera, self.config, self._detector, self.describer)
        self.cameras[camera_id] = worker
        worker.start()
        return worker

    # --- state -------------------------------------------------------------------------------------------------------

    def status(self) -> StatusView:
        """Everything about the present state. Takes locks that other threads hold briefly: not for the event loop."""
        return StatusView(
            version=version("framechat"),
            started_s=self.started_s,
            now_s=now_s(),
            server=self.server.view,
            engine=self.server.engine_view(),
            cameras=[worker.view() for worker in list(self.cameras.values())],
            detector=_detector_words(self._detector.status()) if self._detector is not None else "",
            warnings=self.warnings(),
        )

    def warnings(self) -> list[str]:
        """What the user should know and can mend."""
        found = [self.notice] if self.notice else []
        if self._detector is not None:
            detector = self._detector.status()
            if detector.warning:
                found.append(detector.warning)
            if detector.state == "failed":
                found.append(f"nobody is detected: {detector.detail}")
        if self._stay_removed:
            names = ", ".join(self._stay_removed)
            found.append(f"not watched, for it was removed in the page: {names}; add it again there")
        if self.writer.problem:
            found.append(f"nothing is stored: {self.writer.problem}")
        if self.writer.lost:
            found.append(f"{self.writer.lost} records were not stored")
        return found

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("a background task ended", exc_info=task.exception())


async def _trouble(camera: CameraConfig) -> str | None:
    """Why this source cannot work, as far as can be said in a moment."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(check_source, camera), _CHECK_S)
    except TimeoutError:
        return f"source {mask_source(camera.source)}: its file system does not answer; see whether it is mounted"


def _detector_words(status: DetectorStatus) -> str:
    return Path(status.weights_used).name if status.state == "ready" else status.detail or status.state


def _free_name(names: set[str]) -> str:
    number = 1
    while f"camera {number}" in names:
        number += 1
    return f"camera {number}"
