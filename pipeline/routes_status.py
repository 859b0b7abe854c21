"""Addresses that say how things are: health, status, latency, Prometheus metrics and the live stream."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, WebSocket
from prometheus_client import CONTENT_TYPE_LATEST

from pipeline.api import LatencyView, StatusView
from pipeline.parts import Parts, parts_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """`ok`, or `degraded` while the model server cannot be used; 200 either way, for the service itself works."""
    parts: Parts = parts_of(request)
    why_not = parts.runtime.server.why_not()
    return {"status": "degraded" if why_not else "ok", "detail": why_not}


@router.get("/status")
async def status(request: Request) -> StatusView:
    """Model server, engine, cameras, detector and warnings."""
    return await asyncio.to_thread(parts_of(request).runtime.status)


@router.get("/latency")
async def latency(
    request: Request,
    window_s: Annotated[float | None, Query(gt=0, le=86_400)] = None,
    timeline_s: Annotated[float, Query(ge=0, le=3_600)] = 120.0,
) -> LatencyView:
    """Both classes' percentiles over the window, and the newest samples."""
    runtime = parts_of(request).runtime
    return await asyncio.to_thread(runtime.figures.latency, window_s, timeline_s)


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    body = await asyncio.to_thread(parts_of(request).runtime.figures.prometheus)
    return Response(body, media_type=CONTENT_TYPE_LATEST)


@router.websocket("/live")
async def live(socket: WebSocket) -> None:
    """The one stream of a browser tab."""
    await parts_of(socket).live.serve(socket)
