"""Addresses of token budgets and comparisons: start, watch and stop one, read past ones, apply a budget."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from pipeline.api_compare import (
    BudgetView,
    ComparisonResult,
    ComparisonView,
    RunningComparison,
    SetBudget,
    StartComparison,
)
from pipeline.comparisons import REPORT, SUMMARY
from pipeline.errors import ApiError
from pipeline.parts import parts_of

router = APIRouter()
# The report brings everything with it. Whatever its texts hold, it can reach nobody and nothing of this service.
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
_MAX_SUMMARY_BYTES = 16 * 2**20


@router.get("/server/budget")
async def budget(request: Request) -> BudgetView:
    """The budgets in force, and how a change goes."""
    return await parts_of(request).maintenance.budget()


@router.post("/server/budget", status_code=202)
async def set_budget(request: Request, wanted: SetBudget) -> BudgetView:
    """Apply a budget: a step budget at once, another start-up budget with a restart that loses no description."""
    parts = parts_of(request)
    if wanted.max_num_batched_tokens is not None and wanted.step_budget is not None:
        raise ApiError(422, "max_num_batched_tokens and step_budget: give one of the two")
    if wanted.max_num_batched_tokens is not None:
        parts.maintenance.start_budget(wanted.max_num_batched_tokens)
    else:
        await parts.maintenance.set_step_budget(wanted.step_budget)
    return await parts.maintenance.budget()


@router.get("/comparisons")
async def comparisons(request: Request) -> list[ComparisonView]:
    """Past and present ones, the newest first."""
    return await asyncio.to_thread(parts_of(request).comparisons.all)


@router.post("/comparisons", status_code=202)
async def start(request: Request, wanted: StartComparison) -> RunningComparison:
    """Start one. The product stands still while it runs."""
    found = parts_of(request).comparisons
    found.start(wanted)
    return await asyncio.to_thread(found.now)


@router.get("/comparisons/running")
async def running(request: Request) -> RunningComparison:
    """The one that runs, or how the last one ended."""
    return await asyncio.to_thread(parts_of(request).comparisons.now)


@router.post("/comparisons/running/stop", status_code=202)
async def stop(request: Request) -> RunningComparison:
    """Stop the one that runs; its finished blocks are kept."""
    found = parts_of(request).comparisons
    await found.stop()
    return await asyncio.to_thread(found.now)


@router.get("/comparisons/{name}")
async def result(request: Request, name: str) -> ComparisonResult:
    """One comparison and its summary."""
    found = parts_of(request).comparisons

    def read() -> ComparisonResult:
        view = found.view(name)
        path = found.file(name, SUMMARY)
        if path is None:
            return ComparisonResult(comparison=view, summary=None)
        try:
            if path.stat().st_size > _MAX_SUMMARY_BYTES:
                raise ApiError(413, f"{SUMMARY} of {name} is larger than any that we write; remove it")
            return ComparisonResult(comparison=view, summary=json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ApiError(
                500, f"{SUMMARY} of {name} cannot be read; redraw it with `framechat compare --from`"
            ) from error

    return await asyncio.to_thread(read)


@router.get("/comparisons/{name}/report.html", response_class=FileResponse)
async def report(request: Request, name: str) -> Response:
    """Its report, a page of its own."""
    path = await asyncio.to_thread(parts_of(request).comparisons.file, name, REPORT)
    if path is None:
        raise ApiError(404, f"comparison {name!r} has no report yet; one is written when its first block ends")
    headers = {"Content-Security-Policy": _REPORT_POLICY, "Cache-Control": "no-store"}
    return FileResponse(path, media_type="text/html; charset=utf-8", headers=headers)
