"""Addresses of descriptions and their thumbnails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from pipeline.api import DescriptionView
from pipeline.errors import ApiError
from pipeline.parts import parts_of
from pipeline.store import MAX_RESULTS

router = APIRouter()
PING_S = 15
_SEND_TIMEOUT_S = 30.0
_KEEP = {"Cache-Control": "private, max-age=86400, immutable"}


@router.get("/descriptions")
async def descriptions(
    request: Request,
    q: Annotated[str, Query(max_length=500)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = 50,
    camera_id: Annotated[str | None, Query(max_length=200)] = None,
    before_s: float | None = None,
    state: Annotated[list[str] | None, Query()] = None,
) -> list[DescriptionView]:
    """Descriptions, newest first: those under way and the stored ones; with `q`, stored ones that hold every word."""
    runtime = parts_of(request).runtime
    stored = await asyncio.to_thread(
        lambda: runtime.store.search(q, limit=limit, camera_id=camera_id, before_s=before_s, states=state or ())
    )
    if q.strip() or before_s is not None:
        return stored
    known = {view.description_id for view in stored}
    active = [
        view
        for view in runtime.feed.active()
        if view.description_id not in known
        and camera_id in (None, view.camera_id)
        and (not state or view.state in state)
    ]
    return sorted([*active, *stored], key=lambda view: view.frame_s, reverse=True)[:limit]


@router.get("/descriptions/stream", response_class=EventSourceResponse)
async def stream(request: Request) -> EventSourceResponse:
    """Server-sent events: those under way first, then every change of state and every token."""
    feed = parts_of(request).runtime.feed

    async def events() -> AsyncIterator[ServerSentEvent]:
        with feed.listen() as subscription:
            resync = True
            while True:
                if resync:
                    for view in reversed(feed.active()):
                        yield ServerSentEvent(view.model_dump_json(), event="description", sep="\n")
                    resync = False
                for item in await subscription.wait():
                    if item.kind == "end":
                        return
                    if item.kind == "resync":
                        resync = True
                    else:
                        yield ServerSentEvent(item.json, event=item.kind, sep="\n")

    return EventSourceResponse(events(), ping=PING_S, send_timeout=_SEND_TIMEOUT_S, sep="\n")


@router.get("/thumbnails/{description_id}.jpg", response_class=Response)
async def thumbnail(request: Request, description_id: str) -> Response:
    """The picture of a description, stored or under way."""
    runtime = parts_of(request).runtime
    jpeg = runtime.describer.thumbnail(description_id)
    if jpeg is not None:
        return Response(jpeg, media_type="image/jpeg", headers=_KEEP)
    path = await asyncio.to_thread(runtime.store.thumbnail, description_id)
    if path is None:
        raise ApiError(404, f"thumbnail {description_id[:64]!r} does not exist or is past its retention")
    return FileResponse(path, media_type="image/jpeg", headers=_KEEP)
