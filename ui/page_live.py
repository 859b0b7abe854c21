"""The page "Live": pictures, descriptions, chat and latency on one screen."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import streamlit as st

from ui import panels
from ui.components import panel
from ui.service_client import DEFAULT_URL, ServiceClient


@st.cache_resource
def _client(url: str) -> ServiceClient:
    return ServiceClient(url)


def service_url() -> str:
    """Where this process reaches the camera service."""
    return os.environ.get("FRAMECHAT_SERVICE_URL", DEFAULT_URL)


def service(url: str) -> dict[str, Any]:
    """How the browser reaches the service: its public address, or the page's own host and this port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"url": os.environ.get("FRAMECHAT_PUBLIC_URL") or None, "port": port}


def show() -> None:
    """Lay the page out; it fills the screen once, and its panels scroll inside."""
    url = service_url()
    client, at = _client(url), service(url)
    # The last of the three is room for the links to the other pages and Streamlit's menu.
    top, add, _ = st.columns([0.67, 0.12, 0.21], vertical_alignment="center", gap="small")
    with top:
        panel("status", service=at)
    with add:
        panels.add_camera(client)
    left, middle, right = st.columns([0.48, 0.26, 0.26], gap="small")
    with left:
        panels.pictures(client, at)
        panel("latency", service=at)
    with middle:
        panels.descriptions(client, at)
    with right:
        panels.chat(client, at)
