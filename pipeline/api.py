"""The shapes that cross the service's HTTP API; the page, the terminal and the tests read the same ones.

All times are seconds since the epoch; durations carry their unit in the name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

CameraState = Literal["connecting", "live", "lost", "paused", "ended"]
ServerState = Literal["starting", "ready", "down", "restarting"]
TrackState = Literal["new", "watched", "waiting", "describing", "described", "skipped"]


class TrackView(BaseModel):
    """One person in a picture: `box` is x1, y1, x2, y2 as fractions of the picture's width and height."""

    track_id: int
    person_id: str
    box: tuple[float, float, float, float]
    confidence: float
    state: TrackState
    reason: str  # why it is (not yet) described, in words


class PersonView(BaseModel):
    """One person whom a camera has seen: `reason` says in words why they are (not yet) described.

    `box` is where they were last, as in `TrackView`. In a file read as fast as possible times are positions in it.
    """

    person_id: str
    track_ids: tuple[int, ...]  # one person may be lost and found
    state: TrackState
    reason: str
    box: tuple[float, float, float, float]
    first_seen_s: float
    last_seen_s: float
    visible: bool
    descriptions: int  # how many were made


class CameraView(BaseModel):
    """One camera as the status shows it. `source` is masked."""

    camera_id: str
    name: str
    source: str
    state: CameraState
    detail: str = ""  # what went wrong, what is being waited for
    width_px: int = 0
    height_px: int = 0
    frames: int = 0
    frames_dropped: int = 0
    frames_damaged: int = 0
    source_fps: float | None = None  # measured
    detect_fps: float | None = None  # measured
    frame_age_p95_ms: float | None = None
    reconnects: int = 0
    people_seen: int = 0
    people_described: int = 0
    people_not_described: dict[str, int] = {}  # of those gone: how many, by the kind of reason
    people_unconfirmed: int = 0  # tracks that ended before they counted as somebody
    tracks: list[TrackView] = []


class AddCamera(BaseModel):
    """A camera to add while running."""

    source: str
    name: str | None = None
    username: str | None = None
    password_env: str | None = None
    rotate: Literal[0, 90, 180, 270] = 0
    loop: bool = False


class PatchCamera(BaseModel):
    """What can be changed on a running camera."""

    paused: bool


class Device(BaseModel):
    """A webcam that this machine has."""

    index: int
    path: str
    name: str


class DescriptionView(BaseModel):
    """A description: waiting, streaming or stored, with its stages."""

    description_id: str
    camera_id: str
    camera: str
    person_id: str
    track_id: int
    state: Literal["waiting", "streaming", "done", "failed", "cancelled", "skipped"]
    reason: str = ""
    frame_s: float
    due_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    frame_age_ms: float | None = None  # frame's arrival to due
    waiting_ms: float | None = None  # due to sent
    ttft_ms: float | None = None  # due to first token
    total_ms: float | None = None  # due to last token
    text: str = ""
    box: tuple[float, float, float, float]
    thumbnail: str = ""  # URL path, /thumbnails/<id>.jpg
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    model: str = ""


class Percentiles(BaseModel):
    """Pooled samples of one figure in the window, milliseconds; all None while there is no sample."""

    count: int = 0
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


class ClassLatency(BaseModel):
    """One traffic class over the window. TTFT and ITL are never mixed, nor averaged together."""

    traffic_class: str
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    ttft_slo_p95_ms: float
    itl_slo_p99_ms: float
    stalls: int = 0
    waiting: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    failures: dict[str, int] = {}  # by kind of error
    skipped: dict[str, int] = {}  # by reason


class TimelinePoint(BaseModel):
    """One TTFT or ITL sample, for the live time line."""

    at_s: float
    traffic_class: str
    kind: Literal["ttft", "itl"]
    value_ms: float
    stall: bool = False


class StallView(BaseModel):
    """One of the newest stalls and what its time went to, in words: the largest part, and all of them."""

    at_s: float
    traffic_class: str
    request_id: str
    duration_ms: float
    cause: str
    parts: list[str] = []


class LatencyView(BaseModel):
    """Both classes and the samples of the last `timeline_s` seconds.

    `stalls` holds the newest stalls of requests that have ended, where the engine records its steps; newest first.
    """

    window_s: float
    now_s: float
    classes: list[ClassLatency]
    timeline: list[TimelinePoint] = []
    stalls: list[StallView] = []


class EngineView(BaseModel):
    """The server's own figures, from its Prometheus metrics; None where it does not report one."""

    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None  # 0..1
    prefix_cache_hit_rate: float | None = None
    multimodal_cache_hit_rate: float | None = None
    preemptions: int | None = None
    tokens_per_step: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    age_s: float | None = None


class ServerView(BaseModel):
    """The model server as the service sees it."""

    state: ServerState
    detail: str = ""  # start-up progress or cause of death, one line
    elapsed_s: float | None = None
    endpoint: str
    attached: bool
    model: str | None = None
    version: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    simulated: str | None = None  # what a simulated server simulates; no model runs there


class StatusView(BaseModel):
    """Everything the page needs to know what state the product is in."""

    version: str
    started_s: float
    now_s: float
    server: ServerView
    engine: EngineView
    cameras: list[CameraView]
    detector: str  # weights in use
    warnings: list[str]  # for the user, e.g. fallback weights


class ChatAsk(BaseModel):
    """A user's turn."""

    session_id: str
    text: str
    camera_id: str | None = None  # attach this camera's current picture
    document_id: str | None = None  # makes it a `document` request
    due_s: float | None = None  # when the user pressed Enter; default: when the service got it


class ChatTurn(BaseModel):
    """One message of a session."""

    role: Literal["user", "assistant"]
    text: str
    answer_id: str | None = None  # assistant turns: to resume its stream or to stop it
    state: Literal["waiting", "streaming", "done", "failed", "cancelled"] = "done"
    detail: str = ""
    attachment: str = ""  # what the user attached, in words
    ttft_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    completion_tokens: int | None = None


class ChatSession(BaseModel):
    """A conversation, kept by the service so that a page reload loses nothing."""

    session_id: str
    created_s: float
    turns: list[ChatTurn]
    max_message_chars: int | None = None  # a longer message is refused


class DocumentView(BaseModel):
    """An uploaded document, as text."""

    document_id: str
    name: str
    characters: int
    estimated_tokens: int


class Problem(BaseModel):
    """Every error answer: one line that names the thing and the mend."""

    detail: str
    extra: dict[str, Any] = {}
