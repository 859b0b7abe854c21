"""The FrameChat page: live pictures, descriptions, chat and latency on one screen.

Run by `framechat up` or `framechat ui`. It reads FRAMECHAT_SERVICE_URL, where this process reaches the camera service,
and FRAMECHAT_PUBLIC_URL, where browsers reach it when that is not the page's own host at the service's port.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import streamlit as st

from ui import panels
from ui.components import panel
from ui.service_client import DEFAULT_URL, ServiceClient

# The page fills the screen once; its panels scroll inside. Streamlit's own margins would cost a laptop a fifth of it.
_FRAME = """
<style>
.stMainBlockContainer { padding: 0.55rem 1rem 0.5rem; max-width: none; }
.stMainBlockContainer .stVerticalBlock { gap: 12px; }
.stAppHeader { inset: 0 0.5rem auto auto; width: 220px; height: 56px; min-height: 0; background: transparent; }
.stAppHeader, .stAppToolbar { pointer-events: none; padding: 0; }
.stAppHeader .stMainMenu { pointer-events: auto; }
.stStatusWidget { display: none; }
[data-stale="true"] { opacity: 1 !important; }
.stElementContainer:has(style) { display: none; }
</style>
"""


@st.cache_resource
def _client(url: str) -> ServiceClient:
    return ServiceClient(url)


def _service(url: str) -> dict[str, Any]:
    """How the browser reaches the service: its public address, or the page's own host and this port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"url": os.environ.get("FRAMECHAT_PUBLIC_URL") or None, "port": port}


def main() -> None:
    """Lay the page out."""
    st.set_page_config(page_title="FrameChat", layout="wide", initial_sidebar_state="collapsed")
    st.html(_FRAME)
    url = os.environ.get("FRAMECHAT_SERVICE_URL", DEFAULT_URL)
    client = _client(url)
    service = _service(url)
    # The last of the three is room for Streamlit's menu, with its choice of a light or dark theme.
    top, add, _ = st.columns([0.85, 0.12, 0.03], vertical_alignment="center", gap="small")
    with top:
        panel("status", service=service)
    with add:
        panels.add_camera(client)
    left, middle, right = st.columns([0.48, 0.26, 0.26], gap="small")
    with left:
        panels.pictures(client, service)
        panel("latency", service=service)
    with middle:
        panels.descriptions(client, service)
    with right:
        panels.chat(client, service)


main()
