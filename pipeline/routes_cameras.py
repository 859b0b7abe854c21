"""Addresses of cameras, their pictures, and videos to upload."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from pipeline.api import AddCamera, CameraView, Device, PatchCamera, PersonView
from pipeline.describe import encode_jpeg
from pipeline.errors import ApiError
from pipeline.parts import parts_of
from pipeline.pictures import scaled, with_boxes
from pipeline.source import list_webcams

router = APIRouter()
_QUALITY = 85


@router.get("/cameras")
async def cameras(request: Request) -> list[CameraView]:
    """Every camera with its state."""
    workers = list(parts_of(request).runtime.cameras.values())
    return await asyncio.to_thread(lambda: [worker.view() for worker in workers])


@router.post("/cameras", status_code=201)
async def add(request: Request, camera: AddCamera) -> CameraView:
    """Start watching one more camera."""
    _refuse_while_cameras_rest(request)
    return await parts_of(request).runtime.add_camera(camera)


@router.patch("/cameras/{camera_id}")
async def patch(request: Request, camera_id: str, change: PatchCamera) -> CameraView:
    """Pause a camera, or go on; a file goes on from its beginning."""
    worker = parts_of(request).runtime.camera(camera_id)
    if not change.paused:
        _refuse_while_cameras_rest(request)
    worker.pause(change.paused)
    return await asyncio.to_thread(worker.view)


def _refuse_while_cameras_rest(request: Request) -> None:
    """What is measured meanwhile would not be what was asked for."""
    why = parts_of(request).maintenance.why_cameras_rest()
    if why:
        raise ApiError(409, why)


@router.delete("/cameras/{camera_id}", status_code=204)
async def remove(request: Request, camera_id: str) -> None:
    """Stop watching a camera; its descriptions stay."""
    await parts_of(request).runtime.remove_camera(camera_id)


@router.get("/cameras/{camera_id}/people")
async def people(request: Request, camera_id: str) -> list[PersonView]:
    """Who was seen and how each stands: those not yet forgotten, then the last 256 who were, newest first."""
    worker = parts_of(request).runtime.camera(camera_id)
    return await asyncio.to_thread(worker.people)


@router.get("/cameras/{camera_id}/picture.jpg", response_class=Response)
async def picture(request: Request, camera_id: str) -> Response:
    """The newest picture with boxes."""
    parts = parts_of(request)
    worker = parts.runtime.camera(camera_id)
    width_px = parts.runtime.config.service.live_width_px

    def make() -> bytes | None:
        frame = worker.frame()
        if frame is None:
            return None
        return encode_jpeg(with_boxes(scaled(frame.image, width_px), worker.tracks()), _QUALITY)

    jpeg = await asyncio.to_thread(make)
    if jpeg is None:
        raise ApiError(409, f"camera {worker.camera.name} has no picture yet; try again when it is live")
    return Response(jpeg, media_type="image/jpeg", headers={"Cache-Control": "no-store"})


@router.get("/devices")
async def devices(request: Request) -> list[Device]:
    """The webcams of this machine."""
    return await asyncio.to_thread(list_webcams)


@router.post("/uploads", status_code=201)
async def upload(request: Request) -> dict[str, str]:
    """Take a video (multipart, `file`); the answer's `source` is for POST /cameras."""
    runtime = parts_of(request).runtime
    in_use = {worker.camera.source for worker in runtime.cameras.values()}
    await asyncio.to_thread(runtime.uploads.make_room, in_use)
    return {"source": str(await runtime.uploads.receive(request))}
