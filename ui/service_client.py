"""The page's way to the camera service: one method for each call of its HTTP API that the page makes itself.

Pictures, descriptions, latency and the tokens of chat answers reach the browser straight from the service; these calls
are what a user's click asks for. Every call has a time-out, so a service that hangs cannot hang the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from pipeline.api import (
    AddCamera,
    CameraView,
    ChatAsk,
    ChatSession,
    DescriptionView,
    Device,
    DocumentView,
    Problem,
    StatusView,
)
from pipeline.api_compare import (
    BudgetView,
    ComparisonResult,
    ComparisonView,
    RunningComparison,
    SetBudget,
    StartComparison,
)
from serving.tls import certificates

DEFAULT_URL = "http://127.0.0.1:8600"
CALL_TIMEOUT_S = 5.0
UPLOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0

Model = TypeVar("Model", bound=BaseModel)


class ServiceError(Exception):
    """The service refused; the message is its one line for the user."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServiceUnreachableError(ServiceError):
    """Nothing answered at the service's address within the time-out."""


class ServiceClient:
    """Calls the service at `base_url`. Thread-safe; one for all tabs.

    Every method raises ServiceUnreachableError when nobody answers and ServiceError when the service refuses.
    """

    def __init__(self, base_url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        # The service is on this machine or this network: a proxy meant for the internet would only break it.
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=CALL_TIMEOUT_S,
            trust_env=False,
            transport=transport,
            follow_redirects=False,
            verify=certificates(),
        )

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def status(self) -> StatusView:
        """What the service, its cameras and the model server are doing."""
        return self._parse(StatusView, self._call("GET", "/status"))

    def devices(self) -> list[Device]:
        """Webcams of the service's machine."""
        return self._parse_list(Device, self._call("GET", "/devices"))

    def add_camera(self, camera: AddCamera) -> CameraView:
        """Start watching one more camera."""
        return self._parse(CameraView, self._call("POST", "/cameras", json=camera.model_dump()))

    def pause_camera(self, camera_id: str, *, paused: bool) -> None:
        """Stop reading a camera, or go on."""
        self._call("PATCH", f"/cameras/{camera_id}", json={"paused": paused})

    def remove_camera(self, camera_id: str) -> None:
        """Stop watching a camera; its descriptions stay."""
        self._call("DELETE", f"/cameras/{camera_id}")

    def upload_video(self, name: str, content: BinaryIO, mime: str) -> str:
        """Send a video file; returns the source to add as a camera."""
        files = {"file": (name, content, mime)}
        answer = self._call("POST", "/uploads", files=files, timeout=UPLOAD_TIMEOUT_S).json()
        return str(answer["source"])

    def search(self, query: str, *, limit: int, camera_id: str | None = None) -> list[DescriptionView]:
        """Past descriptions that match `query`, newest first."""
        params: dict[str, Any] = {"q": query, "limit": limit}
        if camera_id is not None:
            params["camera_id"] = camera_id
        return self._parse_list(DescriptionView, self._call("GET", "/descriptions", params=params))

    def new_session(self) -> ChatSession:
        """Open a conversation."""
        return self._parse(ChatSession, self._call("POST", "/chat/sessions"))

    def session(self, session_id: str) -> ChatSession | None:
        """A conversation with its turns, or None when the service no longer has it."""
        try:
            return self._parse(ChatSession, self._call("GET", f"/chat/sessions/{session_id}"))
        except ServiceError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    def add_document(self, name: str, content: BinaryIO, mime: str) -> DocumentView:
        """Send a text or PDF for the next question."""
        files = {"file": (name, content, mime)}
        return self._parse(DocumentView, self._call("POST", "/documents", files=files, timeout=UPLOAD_TIMEOUT_S))

    def ask(self, ask: ChatAsk) -> str:
        """Send a user's turn; returns the answer's id as soon as the service has accepted it.

        The answer goes on in the service: the browser follows it by this id.
        """
        try:
            with self._http.stream("POST", "/chat", json=ask.model_dump()) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for event, data in _events(response.iter_lines()):
                    if event == "answer":
                        return str(json.loads(data)["answer_id"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError) as error:
            raise ServiceError(
                "the service's answer could not be read; are page and service the same version?"
            ) from error
        raise ServiceError("the service closed the connection before it named the answer; ask again")

    def cancel_answer(self, answer_id: str) -> None:
        """Stop an answer; the model server drops its request."""
        self._call("POST", f"/chat/answers/{answer_id}/cancel")

    def budget(self) -> BudgetView:
        """The token budgets in force, and how a change goes."""
        return self._parse(BudgetView, self._call("GET", "/server/budget"))

    def set_budget(self, wanted: SetBudget) -> BudgetView:
        """Apply a budget; a restart goes on in the service."""
        return self._parse(BudgetView, self._call("POST", "/server/budget", json=wanted.model_dump()))

    def comparisons(self) -> list[ComparisonView]:
        """Comparisons, the newest first."""
        return self._parse_list(ComparisonView, self._call("GET", "/comparisons"))

    def comparison(self, name: str) -> ComparisonResult:
        """One comparison with its summary."""
        return self._parse(ComparisonResult, self._call("GET", f"/comparisons/{name}"))

    def running_comparison(self) -> RunningComparison:
        """The one that runs, or how the last one ended."""
        return self._parse(RunningComparison, self._call("GET", "/comparisons/running"))

    def start_comparison(self, wanted: StartComparison) -> RunningComparison:
        """Start one."""
        return self._parse(RunningComparison, self._call("POST", "/comparisons", json=wanted.model_dump(mode="json")))

    def stop_comparison(self) -> None:
        """Stop the one that runs."""
        self._call("POST", "/comparisons/running/stop", timeout=STOP_TIMEOUT_S)

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        return response

    def _unreachable(self, error: httpx.HTTPError) -> ServiceUnreachableError:
        what = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
        return ServiceUnreachableError(f"the camera service at {self.base_url} {what}; is `framechat up` running?")

    @staticmethod
    def _parse(model: type[Model], response: httpx.Response) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise _misfit(response) from error

    @staticmethod
    def _parse_list(model: type[Model], response: httpx.Response) -> list[Model]:
        try:
            return TypeAdapter(list[model]).validate_json(response.content)  # type: ignore[valid-type]
        except ValidationError as error:
            raise _misfit(response) from error


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Server-sent events as (name, data); comments and fields that the page does not use are passed over."""
    name = "message"
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "message", []
        elif line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))


def _misfit(response: httpx.Response) -> ServiceError:
    return ServiceError(
        f"{response.request.url.path} answered in a shape this page does not know; are page and service the same "
        "version?"
    )


def _refusal(response: httpx.Response) -> ServiceError:
    """The service's own words where it gave some."""
    try:
        detail = Problem.model_validate_json(response.content).detail
    except ValidationError:
        detail = f"{response.request.url.path} answered {response.status_code} {response.reason_phrase}"
    return ServiceError(detail, response.status_code)
