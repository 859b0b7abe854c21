"""Every refusal of the HTTP API: an `api.Problem` of one line that names the thing and the mend."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pipeline.api import Problem
from pipeline.chat import ChatError
from pipeline.database import StoreError
from pipeline.documents import DocumentError

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """A refusal with its HTTP status and one line for the user."""

    def __init__(self, status: int, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.extra = extra


def problem(status: int, detail: str, extra: dict[str, Any] | None = None) -> JSONResponse:
    """The answer that carries a refusal."""
    line = " ".join(detail.split())
    return JSONResponse(Problem(detail=line, extra=extra or {}).model_dump(), status_code=status)


def one_line(error: RequestValidationError) -> str:
    """Every wrong field of a request, named, in one line; nothing of the input but short values."""
    parts = []
    for item in error.errors()[:5]:
        place = [str(part) for part in item["loc"] if part not in ("body", "query", "path")]
        field = ".".join(place) or "request"
        message = str(item["msg"]).removeprefix("Value error, ")
        parts.append(f"{field}: {message[:1].lower()}{message[1:]}")
    return "; ".join(parts)


def add_handlers(app: FastAPI) -> None:
    """Make every error of `app` a `Problem`."""

    @app.exception_handler(ApiError)
    async def _refused(_: Request, error: ApiError) -> JSONResponse:
        return problem(error.status, str(error), error.extra)

    @app.exception_handler(ChatError)
    async def _chat(_: Request, error: ChatError) -> JSONResponse:
        return problem(error.status, str(error))

    @app.exception_handler(DocumentError)
    async def _document(_: Request, error: DocumentError) -> JSONResponse:
        return problem(422, str(error))

    @app.exception_handler(StoreError)
    async def _store(_: Request, error: StoreError) -> JSONResponse:
        return problem(503, str(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, one_line(error))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == 404 and detail == "Not Found":
            detail = f"{request.url.path[:100]}: there is no such address; see /docs for all of them"
        elif error.status_code == 405:
            detail = f"{request.method} is not possible on {request.url.path[:100]}; see /docs"
        answer = problem(error.status_code, detail)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(500, f"the service failed on this request ({type(error).__name__}); see its log")
