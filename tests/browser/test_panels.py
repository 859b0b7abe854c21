"""Each panel alone in a real browser, fed by a scripted connection: what it shows, and what it refuses to do."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, WebSocketRoute, expect

pytestmark = pytest.mark.browser

COMPONENTS = Path(__file__).parents[2] / "ui" / "components"
SERVICE = "http://service.test"
HOSTILE = (
    '<img src=x onerror="window.hurt=1"> ![p](http://evil.test/p.png) [l](http://evil.test) <script>hurt=1</script>'
)


class Scene:
    """A page with panels of the product and the service's side of their connection."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.sockets: list[WebSocketRoute] = []
        self.wishes: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.route("http://page.test/", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
        page.route_web_socket("ws://service.test/live", self.connected)
        page.goto("http://page.test/")
        page.add_style_tag(content="body { --st-background-color: #fff; --st-text-color: #111; }")
        page.evaluate("window.panels = {}; window.acted = []")

    def connected(self, socket: WebSocketRoute) -> None:
        self.sockets.append(socket)
        socket.on_message(lambda text: self.wishes.append(json.loads(text)))

    def mount(self, name: str, **data: Any) -> None:
        """Mount a panel as Streamlit does, or hand it new data."""
        css = (COMPONENTS / "base.css").read_text() + (COMPONENTS / f"{name}.css").read_text()
        code = (COMPONENTS / "link.js").read_text() + (COMPONENTS / f"{name}.js").read_text()
        self.page.evaluate(
            """async ([name, css, code, data]) => {
                let panel = window.panels[name];
                if (!panel) {
                    const host = document.createElement("div");
                    host.style.width = "640px";
                    document.body.append(host);
                    const root = host.attachShadow({ mode: "open" });
                    root.innerHTML = '<div class="panel"></div>';
                    const style = document.createElement("style");
                    style.textContent = css;
                    root.append(style);
                    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
                    panel = window.panels[name] = { root, run: (await import(url)).default };
                }
                panel.leave = panel.run({
                    data, parentElement: panel.root, name,
                    setTriggerValue: (event, value) => window.acted.push(value),
                });
            }""",
            [name, css, code, {"service": {"url": SERVICE, "port": 8600}, **data}],
        )

    def say(self, kind: str, **message: Any) -> None:
        self.sockets[-1].send(json.dumps({"type": kind, **message}))

    def acted(self) -> list[dict[str, Any]]:
        return list(self.page.evaluate("window.acted"))


@pytest.fixture
def scene(browser: Browser) -> Iterator[Scene]:
    page = browser.new_page(viewport={"width": 1366, "height": 768})
    scene = Scene(page)
    yield scene
    errors, hurt = scene.errors, page.evaluate("window.hurt")
    page.close()
    assert not errors
    assert hurt is None
    assert not [url for url in scene.requests if "evil.test" in url]


def status(**server: Any) -> dict[str, Any]:
    return {
        "version": "0.1.0", "started_s": 0, "now_s": 1000.0, "detector": "sample", "warnings": [],
        "server": {
            "state": "ready", "detail": "", "elapsed_s": None, "endpoint": "", "attached": False, "model": "m",
            "version": "0.32.0", "max_model_len": 4096, "max_num_batched_tokens": 256,
            "max_num_scheduled_tokens": None, "long_prefill_token_threshold": 128, **server,
        },
        "engine": {
            "running": 3, "waiting": 1, "kv_cache_usage": 0.125, "prefix_cache_hit_rate": 0.5, "preemptions": 0,
            "multimodal_cache_hit_rate": 0.25, "tokens_per_step": 130.4, "age_s": 0.2,
            "prompt_tokens_per_s": 212.0, "generation_tokens_per_s": 31.0,
        },
        "cameras": [camera()],
    }  # fmt: skip


def camera(**changes: Any) -> dict[str, Any]:
    return {
        "camera_id": "c1", "name": "street", "source": "sample", "state": "live", "detail": "", "width_px": 64,
        "height_px": 48, "frames": 5, "frames_dropped": 0, "frames_damaged": 0, "source_fps": 10.0, "detect_fps": 5.0,
        "frame_age_p95_ms": 60.0, "reconnects": 0, "people_seen": 2, "people_described": 1,
        "people_not_described": {}, "tracks": [], **changes,
    }  # fmt: skip


def description(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "description_id": f"d{number}", "camera_id": "c1", "camera": "street", "person_id": f"street-{number}",
        "track_id": number, "state": "waiting", "reason": "", "frame_s": 999.0 + number, "due_s": 999.1 + number,
        "sent_s": None, "first_token_s": None, "last_token_s": None, "frame_age_ms": 100.0, "waiting_ms": None,
        "ttft_ms": None, "total_ms": None, "text": "", "box": [0, 0, 1, 1], "thumbnail": "", "prompt_tokens": None,
        "cached_tokens": None, "completion_tokens": None, "finish_reason": None, "model": "m", **changes,
    }  # fmt: skip


def figures(p50: float | None = None, p95: float | None = None, p99: float | None = None) -> dict[str, Any]:
    return {"count": 0 if p50 is None else 9, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "max_ms": p99}


def latency(timeline: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    def one(name: str, ttft: dict[str, Any], itl: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "traffic_class": name, "ttft": ttft, "itl": itl, "tpot": figures(), "ttft_slo_p95_ms": 2000.0,
            "itl_slo_p99_ms": 500.0, "stalls": 0, "waiting": 0, "in_flight": 0, "done": 0, "failed": 0,
            "cancelled": 0, "skipped": {}, "failures": {}, **more,
        }  # fmt: skip

    return {
        "window_s": 300.0,
        "now_s": 1000.0,
        "classes": [
            one("camera", figures(2500, 3900, 4100), figures(80, 110, 150), in_flight=2, waiting=3),
            one("chat", figures(120, 400, 420), figures(37, 66, 612), stalls=4),
            one("document", figures(), figures()),
        ],
        "timeline": timeline or [],
    }


def frame(colour: tuple[int, int, int], tracks: list[dict[str, Any]] | None = None) -> bytes:
    picture = BytesIO()
    Image.new("RGB", (64, 48), colour).save(picture, "JPEG", quality=95)
    head = {"type": "frame", "camera_id": "c1", "frame_s": 999.9, "width_px": 64, "height_px": 48}
    text = json.dumps({**head, "tracks": tracks or []}).encode()
    return struct.pack(">I", len(text)) + text + picture.getvalue()


def pixel(page: Page) -> list[int]:
    """The colour in the middle of the picture's canvas."""
    return list(
        page.locator("canvas[data-frames]").evaluate(
            "c => [...c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1).data]"
        )
    )


@pytest.mark.parametrize("name", ["status", "simulated"])
def test_a_simulated_server_is_said_to_be_one(scene: Scene, name: str) -> None:
    scene.mount(name)
    scene.page.wait_for_function("framechatLink.socket?.readyState === 1")
    scene.say("status", **status())
    scene.page.wait_for_function("framechatLink.status !== null")
    expect(scene.page.get_by_text("SIMULATED")).to_be_hidden()
    scene.say("status", **status(simulated="simulated: vllm scheduling, budget 256"))
    expect(scene.page.get_by_text("SIMULATED")).to_contain_text("budget 256")


def test_all_panels_share_one_connection_that_closes_with_the_last(scene: Scene) -> None:
    for name in ("status", "pictures", "descriptions", "latency"):
        scene.mount(name)
    scene.mount("transcript", session=None, problem="")
    scene.say("status", **status())
    expect(scene.page.get_by_text("Model server ready")).to_be_visible()
    assert len(scene.sockets) == 1
    scene.page.evaluate("for (const panel of Object.values(window.panels)) panel.leave()")
    scene.page.wait_for_function("window.framechatLink === undefined", timeout=8000)


def test_a_lost_connection_is_said_and_made_again(scene: Scene) -> None:
    scene.mount("status")
    scene.say("status", **status())
    expect(scene.page.get_by_text("Model server ready")).to_be_visible()
    scene.sockets[-1].close()
    expect(scene.page.get_by_text("Lost the camera service at http://service.test: ")).to_be_visible()
    scene.page.wait_for_function("globalThis.framechatLink.phase !== 'waiting'", timeout=8000)
    scene.page.wait_for_timeout(200)
    scene.say("status", **status())
    expect(scene.page.get_by_text("Model server ready")).to_be_visible()
    assert len(scene.sockets) == 2


def test_a_refusal_is_told_in_the_services_words(scene: Scene) -> None:
    scene.mount("status")
    scene.say("status", **status())
    scene.sockets[-1].close(code=1013, reason="64 pages are open; close one")
    expect(scene.page.get_by_text("64 pages are open; close one.")).to_be_visible()


@pytest.mark.parametrize(
    ("server", "words"),
    [
        pytest.param(
            {"state": "starting", "detail": "loading weights", "elapsed_s": 41.2},
            ["Model server starting for 41.2 s", "loading weights"],
            id="starting",
        ),
        pytest.param({"state": "down", "detail": "out of memory"}, ["Model server down", "out of memory"], id="down"),
        pytest.param(
            {"state": "restarting", "elapsed_s": 3.0}, ["Model server restarting for 3.00 s"], id="restarting"
        ),
    ],
)
def test_the_top_line_tells_the_servers_state(scene: Scene, server: dict[str, Any], words: list[str]) -> None:
    scene.mount("status")
    scene.say("status", **status(**server))
    for text in words:
        expect(scene.page.get_by_text(text)).to_be_visible()


def test_warnings_are_shown_as_text(scene: Scene) -> None:
    scene.mount("status")
    scene.say("status", **{**status(), "warnings": [f"fallback weights {HOSTILE}"]})
    expect(scene.page.get_by_role("alert")).to_have_text(f"fallback weights {HOSTILE}")


def test_a_picture_is_drawn_and_the_next_replaces_it(scene: Scene) -> None:
    scene.mount("pictures")
    scene.say("status", **status())
    scene.sockets[-1].send(frame((220, 30, 30)))
    scene.page.locator("canvas[data-frames='1']").wait_for()
    assert pixel(scene.page)[0] > 180
    scene.sockets[-1].send(frame((30, 30, 220)))
    scene.page.locator("canvas[data-frames='2']").wait_for()
    assert pixel(scene.page)[2] > 180
    assert scene.wishes[-1]["cameras"] == "all"


def test_a_picture_drawn_again_at_another_size_is_counted_once(scene: Scene) -> None:
    scene.mount("pictures")
    scene.say("status", **status())
    scene.sockets[-1].send(frame((220, 30, 30)))
    canvas = scene.page.locator("canvas[data-frames]")
    canvas.wait_for()
    before = canvas.evaluate("c => c.width")
    scene.page.evaluate("window.panels.pictures.root.host.style.width = '400px'")
    scene.page.wait_for_function(
        "before => window.panels.pictures.root.querySelector('canvas').width < before", arg=before
    )
    expect(canvas).to_have_attribute("data-frames", "1")


def test_boxes_have_the_colour_of_their_state_and_are_counted(scene: Scene) -> None:
    scene.mount("pictures")
    scene.say("status", **status())
    track = {"track_id": 1, "person_id": "street-1", "confidence": 0.9, "reason": "", "box": [0.25, 0.25, 0.5, 0.75]}
    scene.sockets[-1].send(frame((0, 0, 0), [{**track, "state": "described"}]))
    canvas = scene.page.locator("canvas[data-frames]")
    canvas.wait_for()
    edge = canvas.evaluate("c => [...c.getContext('2d').getImageData(c.width * .25, c.height * .6, 1, 1).data]")
    assert edge[1] > 150
    assert edge[1] > edge[0]
    scene.say("status", **status())
    expect(scene.page.get_by_text("described 1", exact=True)).to_be_visible()
    assert "1 people in view: P1 described" in (canvas.get_attribute("aria-label") or "")


@pytest.mark.parametrize(
    ("state", "detail", "words"),
    [
        pytest.param("lost", "no answer for 10 s; attempt 3", "Camera lost", id="lost"),
        pytest.param("connecting", "opening", "Connecting", id="connecting"),
        pytest.param("paused", "", "Paused", id="paused"),
        pytest.param("ended", "", "The video has ended", id="ended"),
    ],
)
def test_a_camera_that_is_not_live_says_why(scene: Scene, state: str, detail: str, words: str) -> None:
    scene.mount("pictures")
    scene.say("status", **{**status(), "cameras": [camera(state=state, detail=detail)]})
    note = scene.page.locator(".note")
    expect(note.get_by_text(words)).to_be_visible()
    expect(note).to_contain_text(detail)


def test_a_live_camera_without_detection_says_so(scene: Scene) -> None:
    scene.mount("pictures")
    scene.say("status", **status())
    scene.sockets[-1].send(frame((0, 0, 0)))
    scene.page.locator("canvas[data-frames='1']").wait_for()
    scene.say("status", **{**status(), "cameras": [camera(detail="no detection: the detector died")]})
    expect(scene.page.locator(".note")).to_have_text("no detection: the detector died")
    scene.say("status", **status())
    expect(scene.page.locator(".note")).to_be_hidden()


def test_no_camera_says_how_to_add_one(scene: Scene) -> None:
    scene.mount("pictures")
    scene.say("status", **{**status(), "cameras": []})
    expect(scene.page.get_by_text("No camera yet.")).to_be_visible()


def test_removing_a_camera_asks_twice(scene: Scene) -> None:
    scene.mount("pictures")
    scene.say("status", **status())
    scene.page.get_by_role("button", name="Remove").click()
    assert scene.acted() == []
    scene.page.get_by_role("button", name="Really remove?").click()
    scene.page.get_by_role("button", name="Pause").click()
    assert [(item["what"], item["camera_id"]) for item in scene.acted()] == [("remove", "c1"), ("pause", "c1")]


def test_a_description_grows_by_its_tokens_and_stays_text(scene: Scene) -> None:
    scene.mount("descriptions", found=None)
    scene.say("status", **status())
    scene.say("descriptions", items=[])
    expect(scene.page.get_by_text("Nothing seen yet.")).to_be_visible()
    scene.say("description", **description(state="streaming", sent_s=1000.5, waiting_ms=400.0, ttft_ms=1900.0))
    card = scene.page.get_by_role("article")
    scene.say("token", description_id="d1", text="A man ")
    expect(card).to_contain_text("A man")
    scene.say("token", description_id="d1", text=HOSTILE)
    expect(card.locator(".text")).to_have_text(f"A man {HOSTILE}")
    scene.say(
        "description", **description(state="done", waiting_ms=400.0, ttft_ms=1900.0, total_ms=3100.0, text="Over.")
    )
    expect(card.locator(".text")).to_have_text("Over.")
    expect(card.locator(".figures")).to_have_text("frame 100 ms · waited 400 ms · TTFT 1.90 s · last token 3.10 s")


@pytest.mark.parametrize(
    ("view", "words"),
    [
        pytest.param({"state": "waiting"}, "waiting", id="queue"),
        pytest.param({"state": "streaming", "sent_s": 1001.0, "waiting_ms": 9.0}, "reading the picture", id="prefill"),
        pytest.param({"state": "streaming", "sent_s": 1001.0, "ttft_ms": 900.0, "text": "A"}, "writing", id="decode"),
        pytest.param({"state": "cancelled", "reason": "left 20 s ago"}, "cancelled", id="cancelled"),
    ],
)
def test_a_description_says_what_it_is_at(scene: Scene, view: dict[str, Any], words: str) -> None:
    scene.mount("descriptions", found=None)
    scene.say("description", **description(**view))
    expect(scene.page.locator(".card .state")).to_have_text(words)


def test_a_failed_description_says_why(scene: Scene) -> None:
    scene.mount("descriptions", found=None)
    scene.say("description", **description(state="failed", reason="the stream was cut"))
    expect(scene.page.get_by_role("article")).to_contain_text("failed")
    expect(scene.page.get_by_role("article")).to_contain_text("the stream was cut")


def test_people_who_left_without_a_description_are_counted_by_reason(scene: Scene) -> None:
    scene.mount("descriptions", found=None)
    cameras = [
        camera(people_not_described={"too small": 4}),
        camera(camera_id="c2", people_not_described={"too small": 1}),
    ]
    scene.say("status", **{**status(), "cameras": cameras})
    expect(scene.page.get_by_text("Left without a description: 5 too small")).to_be_visible()


def test_the_feed_keeps_the_newest_and_does_not_grow(scene: Scene) -> None:
    scene.mount("descriptions", found=None)
    for number in range(300):
        scene.say("description", **description(number, state="done", text="x"))
    expect(scene.page.get_by_role("article").first).to_contain_text("P299")
    assert scene.page.get_by_role("article").count() == 40
    assert scene.page.evaluate("framechatLink.descriptions.size") <= 60


def test_a_search_shows_its_finds_until_the_user_goes_back(scene: Scene) -> None:
    scene.mount("descriptions", found=None)
    scene.say("description", **description(1, state="done", text="live one"))
    found = {"query": "red", "items": [description(7, state="done", text="red jacket")], "more": False, "problem": ""}
    scene.mount("descriptions", found=found)
    expect(scene.page.get_by_role("heading")).to_have_text("Found 1 for “red”")
    expect(scene.page.get_by_role("article")).to_contain_text("red jacket")
    scene.say("description", **description(2, state="done", text="another"))
    expect(scene.page.get_by_role("article")).to_have_count(1)
    scene.page.get_by_role("button", name="Back to live").click()
    assert scene.acted()[-1]["what"] == "live"
    scene.mount("descriptions", found=None)
    expect(scene.page.get_by_role("article")).to_have_count(2)


def test_latency_shows_both_classes_and_marks_a_missed_objective(scene: Scene) -> None:
    scene.mount("latency")
    scene.say("status", **status())
    scene.say("latency", **latency())
    row = scene.page.locator("tr[data-class='chat'][data-figure='itl']")
    expect(row.locator("td").nth(0)).to_have_text("37 ms")
    expect(row.locator("td.judged")).to_have_text("612 ms")
    expect(row.locator(".slo")).to_have_text("p99 ≤ 500 ms ✕")
    expect(scene.page.locator("tr[data-class='camera'][data-figure='itl'] .slo")).to_have_text("p99 ≤ 500 ms ✓")
    expect(scene.page.get_by_text("2 in flight · 3 waiting")).to_be_visible()
    expect(scene.page.get_by_text("4 stalls")).to_be_visible()
    expect(scene.page.get_by_text("256 tokens", exact=True)).to_be_visible()
    expect(scene.page.get_by_text("12.5 %")).to_be_visible()
    expect(scene.page.get_by_text("50 % · 25 %")).to_be_attached()
    expect(scene.page.locator("tbody[data-class='document']")).to_be_hidden()


def test_the_newest_stall_has_its_cause(scene: Scene) -> None:
    scene.mount("latency")
    scene.say("status", **status())
    scene.say("latency", **latency())
    expect(scene.page.get_by_text("newest stall")).to_be_hidden()
    parts = ["prefill of camera request 3f2a91c0 (812 tokens): 900 ms", "decoding: 100 ms"]
    view = {
        "at_s": 999.0, "traffic_class": "chat", "request_id": "x", "duration_ms": 1000.0, "cause": parts[0],
        "parts": parts,
    }  # fmt: skip
    scene.say("latency", **latency(), stalls=[view, {**view, "cause": "older"}])
    shown = scene.page.get_by_text("newest stall: chat 1.00 s, prefill of camera request 3f2a91c0 (812 tokens): 900 ms")
    expect(shown).to_be_visible()
    expect(shown).to_have_attribute("title", "\n".join(parts))


def test_the_time_line_counts_stalls_takes_doubles_once_and_does_not_grow(scene: Scene) -> None:
    scene.mount("latency")
    scene.say("status", **status())
    point = {"traffic_class": "chat", "kind": "itl", "value_ms": 900.0, "stall": True}
    points = [{**point, "at_s": 990.0 + number} for number in range(3)]
    scene.say("latency", **latency(points))
    scene.say("latency", **latency([*points[1:], {**point, "at_s": 993.5}]))
    line = scene.page.locator(".timeline canvas")
    expect(line).to_have_attribute(
        "aria-label", "Time line of the last 120 seconds: every TTFT and ITL sample of chat and camera; 4 stalls"
    )
    for start in range(5):
        many = [{**point, "at_s": 1000.0 + start * 3000 + n, "stall": False} for n in range(3000)]
        scene.say("latency", **latency(many))
    scene.page.wait_for_function("framechatLink.samples.at(-1).at_s === 15999")
    assert scene.page.evaluate("framechatLink.samples.length") == 8000


def turn(role: str, text: str, **changes: Any) -> dict[str, Any]:
    return {
        "role": role, "text": text, "answer_id": None, "state": "done", "detail": "", "attachment": "",
        "ttft_ms": None, "itl_p50_ms": None, "itl_p99_ms": None, "completion_tokens": None, **changes,
    }  # fmt: skip


def answering(scene: Scene, body: str, http_status: int = 200) -> None:
    """Script the events of answer a1."""
    scene.page.route(
        f"{SERVICE}/chat/answers/a1/events?after=*",
        lambda route: route.fulfill(
            status=http_status,
            body=body,
            headers={"content-type": "text/event-stream", "access-control-allow-origin": "http://page.test"},
        ),
    )


def events(*items: tuple[str, dict[str, Any]]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in items)


def conversation(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"session": {"session_id": "s1", "created_s": 0, "turns": list(turns)}, "problem": ""}


def test_an_answer_in_flight_is_followed_to_its_end(scene: Scene) -> None:
    end = turn("assistant", "Two **words**", answer_id="a1", ttft_ms=118.0, itl_p50_ms=31.0, itl_p99_ms=420.0)
    answering(scene, events(("token", {"text": "Two "}), ("token", {"text": "**words**"}), ("end", end)))
    scene.mount(
        "transcript", **conversation(turn("user", "hi"), turn("assistant", "", answer_id="a1", state="waiting"))
    )
    answer = scene.page.locator("[data-role='assistant']")
    expect(answer.locator(".say")).to_have_text("Two words")
    expect(answer.locator("strong")).to_have_text("words")
    expect(answer.locator(".meta")).to_have_text("TTFT 118 ms · ITL p50 31 ms, p99 420 ms")
    expect(scene.page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_rerun_of_the_page_with_older_data_does_not_undo_an_answer(scene: Scene) -> None:
    answering(scene, events(("token", {"text": "Done."}), ("end", turn("assistant", "Done.", answer_id="a1"))))
    older = conversation(turn("user", "hi"), turn("assistant", "", answer_id="a1", state="waiting"))
    scene.mount("transcript", **older)
    expect(scene.page.locator("[data-role='assistant'][data-state='done']")).to_contain_text("Done.")
    scene.mount("transcript", **older)
    expect(scene.page.locator("[data-role='assistant']")).to_contain_text("Done.")
    assert sum("/events" in url for url in scene.requests) == 1


def test_an_answer_that_the_service_forgot_is_said_to_have_failed(scene: Scene) -> None:
    answering(scene, "{}", 404)
    scene.mount("transcript", **conversation(turn("assistant", "half", answer_id="a1", state="streaming")))
    expect(scene.page.get_by_text("failed: the service no longer has this answer; ask again")).to_be_visible()


def test_stop_names_the_answer(scene: Scene) -> None:
    scene.page.route(f"{SERVICE}/chat/answers/a1/events?after=*", lambda _: None)  # never answers
    scene.mount("transcript", **conversation(turn("assistant", "", answer_id="a1", state="waiting")))
    scene.page.get_by_role("button", name="Stop").click()
    assert scene.acted()[-1] | {"at": 0} == {"what": "stop", "answer_id": "a1", "at": 0}


def test_a_refused_question_is_kept_to_be_sent_again(scene: Scene) -> None:
    unsent = {"text": f"my long question {HOSTILE}", "reason": "the model server is starting"}
    scene.mount("transcript", **conversation(), unsent=unsent)
    expect(scene.page.get_by_text("my long question")).to_have_text(unsent["text"])
    expect(scene.page.get_by_text("Not sent: the model server is starting")).to_be_visible()
    scene.page.get_by_role("button", name="Send again").click()
    assert scene.acted()[-1]["what"] == "resend"


def test_the_page_is_told_once_that_the_cameras_changed(scene: Scene) -> None:
    scene.mount("transcript", **conversation(), cameras=["c1"])
    for _ in range(2):
        scene.say("status", **status())
    for _ in range(3):
        scene.say("status", **{**status(), "cameras": [camera(), camera(camera_id="c2", name="yard")]})
    scene.page.wait_for_function("framechatLink.status?.cameras.length === 2 && window.acted.length > 0")
    scene.page.wait_for_timeout(300)
    assert [item["what"] for item in scene.acted()] == ["cameras"]


MARKDOWN: list[Any] = [
    pytest.param("a `b*c*` *d*", "<p>a <code>b*c*</code> <em>d</em></p>", id="inline"),
    pytest.param("# T\n- x\n- y", '<p class="heading">T</p><ul><li>x</li><li>y</li></ul>', id="list"),
    pytest.param("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>', id="numbered"),
    pytest.param("```py\n<b>&\n```\nend", '<pre tabindex="0"><code>&lt;b&gt;&amp;\n</code></pre><p>end</p>', id="code"),
    pytest.param("```\nopen", '<pre tabindex="0"><code>open\n</code></pre>', id="unclosed-code"),
    pytest.param("2 * 3 * 4 costs $5", "<p>2 * 3 * 4 costs $5</p>", id="not-emphasis"),
    pytest.param("![p](http://evil.test/p.png)", "<p>![p](http://evil.test/p.png)</p>", id="picture-stays-text"),
    pytest.param("[l](javascript:hurt=1)", "<p>[l](javascript:hurt=1)</p>", id="link-stays-text"),
    pytest.param("<img src=x onerror=hurt=1>", "<p>&lt;img src=x onerror=hurt=1&gt;</p>", id="markup-stays-text"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MARKDOWN)
def test_answers_are_laid_out_from_text_alone(scene: Scene, text: str, expected: str) -> None:
    scene.mount("transcript", **conversation(turn("assistant", text, answer_id="a0")))
    assert scene.page.locator("[data-role='assistant'] .say").inner_html() == expected


def test_a_question_is_shown_as_it_was_typed(scene: Scene) -> None:
    scene.mount("transcript", **conversation(turn("user", HOSTILE, attachment="picture of street")))
    expect(scene.page.locator("[data-role='user'] .say")).to_have_text(HOSTILE)
    expect(scene.page.get_by_text("Attached: picture of street")).to_be_visible()
