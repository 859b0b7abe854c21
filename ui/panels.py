"""The parts of the page that talk back: adding cameras, searching, chatting. Each is a fragment, so that using one
redraws nothing of the others."""

from __future__ import annotations

import time
from typing import Any, Literal

import streamlit as st

from pipeline.api import AddCamera, CameraView, ChatAsk, ChatSession
from ui.components import panel
from ui.service_client import ServiceClient, ServiceError

ROTATIONS_DEG: tuple[Literal[0, 90, 180, 270], ...] = (0, 90, 180, 270)
VIDEO_TYPES = ["mp4", "mkv", "avi", "mov", "webm", "m4v", "mpg", "ts"]
DOCUMENT_TYPES = ["txt", "md", "pdf"]
SEARCH_LIMIT = 40
UNSENT_KEY = "unsent"
SESSION_KEY = "chat"  # in the page's address, so that a reload finds the conversation again


def say_error(error: ServiceError) -> None:
    """Show why something could not be done, without moving the page."""
    st.toast(plain(str(error)), icon=":material/error:", duration="long")


def plain(text: str) -> str:
    """Text of cameras, users and models as Markdown that shows exactly that text."""
    return "".join(f"\\{character}" if character in r"\`*_{}[]()<>#+-.!|~$:^=&" else character for character in text)


@st.fragment
def pictures(client: ServiceClient, service: dict[str, Any]) -> None:
    """Live pictures with the buttons that pause and remove a camera."""

    def act(action: dict[str, Any]) -> None:
        camera_id = str(action["camera_id"])
        try:
            if action["what"] == "remove":
                client.remove_camera(camera_id)
            else:
                client.pause_camera(camera_id, paused=action["what"] == "pause")
        except ServiceError as error:
            say_error(error)

    panel("pictures", service=service, on_action=act)


def add_camera(client: ServiceClient) -> None:
    """The form behind "Add camera": a webcam of this machine, an address, or a video to upload."""
    with st.popover("Add camera", icon=":material/videocam:", width="stretch"):
        _add_camera_forms(client)


@st.fragment
def _add_camera_forms(client: ServiceClient) -> None:
    webcam, address, video = st.tabs(["Webcam", "Address or file", "Upload a video"])
    with webcam:
        _add_webcam(client)
    with address, st.form("add_address", border=False, clear_on_submit=False):
        source = st.text_input(
            "Source",
            placeholder="rtsp://camera.lan:554/stream",
            help="RTSP or HTTP address, webcam index or device path, video file, folder or picture on the service's "
            "machine, `sample` or `sample-photos`. Never write a password here.",
        )
        name = st.text_input("Name", placeholder="front door", max_chars=64, key="address_name")
        left, right = st.columns(2)
        username = left.text_input("User name", help="Only where the camera asks for one.")
        password_env = right.text_input(
            "Password variable",
            placeholder="DOOR_PASSWORD",
            help="The name of an environment variable of the service that holds the password; not the password.",
        )
        turn = left.selectbox("Rotate", ROTATIONS_DEG, format_func=lambda degrees: f"{degrees}°")
        loop = right.checkbox("Repeat a file at its end")
        if st.form_submit_button("Watch this camera", type="primary") and _given(source):
            _watch(
                client,
                AddCamera(
                    source=source.strip(),
                    name=name.strip() or None,
                    username=username.strip() or None,
                    password_env=password_env.strip() or None,
                    rotate=turn,
                    loop=loop,
                ),
            )
    with video, st.form("add_video", border=False, clear_on_submit=True):
        upload = st.file_uploader("Video", type=VIDEO_TYPES)
        title = st.text_input("Name", placeholder="yesterday evening", max_chars=64, key="video_name")
        again = st.checkbox("Repeat it at its end", value=True)
        if st.form_submit_button("Upload and watch", type="primary"):
            if upload is None:
                st.warning("Choose a video first.")
                return
            try:
                with st.spinner("Uploading to the service …"):
                    stored = client.upload_video(upload.name, upload, upload.type or "application/octet-stream")
            except ServiceError as error:
                st.error(plain(str(error)))
            else:
                _watch(client, AddCamera(source=stored, name=title.strip() or None, loop=again))


def _add_webcam(client: ServiceClient) -> None:
    try:
        devices = client.devices()
    except ServiceError as error:
        st.error(plain(str(error)))
        return
    if not devices:
        st.info(
            "No webcam is found on the service's machine; they are listed on Linux only. A webcam's number (the first "
            "is 0) and a network camera go under “Address or file”."
        )
    for device in devices:
        label = f"{plain(device.name)} ({plain(device.path)})"
        if st.button(f"Watch {label}", key=f"webcam_{device.index}", width="stretch"):
            _watch(client, AddCamera(source=str(device.index), name=None))
    if st.button("Look again", icon=":material/refresh:"):
        st.rerun(scope="fragment")


def _given(source: str) -> bool:
    if not source.strip():
        st.warning("Give a source first.")
        return False
    return True


def _watch(client: ServiceClient, camera: AddCamera) -> None:
    try:
        added = client.add_camera(camera)
    except ServiceError as error:
        st.error(plain(str(error)))
    else:
        st.success(f"Watching {plain(added.name)}.")


@st.fragment
def descriptions(client: ServiceClient, service: dict[str, Any]) -> None:
    """Descriptions as they stream; with words in the search box, the stored ones that hold them."""
    query = st.text_input(
        "Search descriptions",
        placeholder="Search past descriptions, e.g. red jacket",
        label_visibility="collapsed",
        icon=":material/search:",
        key="search",
    ).strip()
    found: dict[str, Any] | None = None
    if query:
        try:
            items = [item.model_dump() for item in client.search(query, limit=SEARCH_LIMIT)]
            found = {"query": query, "items": items, "more": len(items) == SEARCH_LIMIT, "problem": ""}
        except ServiceError as error:
            found = {"query": query, "items": [], "more": False, "problem": str(error)}

    def act(_: dict[str, Any]) -> None:
        st.session_state.search = ""

    panel("descriptions", service=service, on_action=act, found=found)


@st.fragment
def chat(client: ServiceClient, service: dict[str, Any]) -> None:
    """The conversation and what is asked next."""
    session, problem = _session(client)
    cameras = _cameras(client) if session is not None else []

    def act(action: dict[str, Any]) -> None:
        try:
            if action["what"] == "new":
                st.query_params[SESSION_KEY] = client.new_session().session_id
            elif action["what"] == "stop":
                client.cancel_answer(str(action["answer_id"]))
            elif action["what"] == "resend" and UNSENT_KEY in st.session_state:
                _send(client, st.session_state.pop(UNSENT_KEY))
            elif action["what"] == "drop":
                st.session_state.pop(UNSENT_KEY, None)
        except ServiceError as error:
            say_error(error)

    panel(
        "transcript",
        service=service,
        on_action=act,
        session=session.model_dump() if session is not None else None,
        problem=problem,
        unsent=st.session_state.get(UNSENT_KEY),
        cameras=[camera.camera_id for camera in cameras],  # it asks for a rerun when these are no longer the cameras
    )
    attach, which = st.columns([1, 1], vertical_alignment="center", gap="small")
    names = {camera.camera_id: camera.name for camera in cameras}
    attached = attach.toggle(
        "Attach picture",
        key="attach",
        disabled=not names,
        help="Send the camera's current picture with the question.",
    )
    camera_id = which.selectbox(
        "Camera",
        list(names),
        format_func=lambda identity: names.get(identity, identity),
        key="attach_camera",
        label_visibility="collapsed",
        disabled=not attached,
        placeholder="no camera",
    )
    st.chat_input(
        "Ask the model",
        key="question",
        accept_file=True,
        file_type=DOCUMENT_TYPES,
        disabled=session is None,
        max_chars=session.max_message_chars if session is not None else None,
        on_submit=_ask,
        args=(client, session, camera_id if attached else None),
    )


def _session(client: ServiceClient) -> tuple[ChatSession | None, str]:
    """The conversation that the page's address names, or the tab's own, or a fresh one; or None and why."""
    try:
        # Streamlit drops the address's parameters when the tab visits another page.
        known = st.query_params.get(SESSION_KEY) or st.session_state.get(SESSION_KEY)
        session = client.session(known) if known else None
        if session is None:
            session = client.new_session()
            if known:
                st.toast("The service no longer has that conversation; this is a new one.", icon=":material/info:")
        st.session_state[SESSION_KEY] = session.session_id
        if st.query_params.get(SESSION_KEY) != session.session_id:
            st.query_params[SESSION_KEY] = session.session_id
    except ServiceError as error:
        return None, str(error)
    return session, ""


def _cameras(client: ServiceClient) -> list[CameraView]:
    try:
        return client.status().cameras
    except ServiceError:
        return []  # the panels say that the service is away


def _ask(client: ServiceClient, session: ChatSession | None, camera_id: str | None) -> None:
    due_s = time.time()
    given = st.session_state.question
    if given is None or session is None:
        return
    text = given.text.strip() or ("Summarize this document." if given.files else "")
    question = {"session_id": session.session_id, "text": text, "camera_id": camera_id, "due_s": due_s}
    try:
        for file in given.files:
            question["document_id"] = client.add_document(file.name, file, file.type or "text/plain").document_id
    except ServiceError as error:
        if given.text.strip():
            _keep(question, f"{error}. Sent again, it goes without the document")
        else:
            say_error(error)
        return
    if text:
        _send(client, question)


def _send(client: ServiceClient, question: dict[str, Any]) -> None:
    """Ask; a question that is refused is kept, with the reason, for the user to send again."""
    try:
        client.ask(ChatAsk.model_validate(question))
    except ServiceError as error:
        _keep(question, str(error))


def _keep(question: dict[str, Any], reason: str) -> None:
    st.session_state[UNSENT_KEY] = {**question, "reason": reason, "due_s": None}
