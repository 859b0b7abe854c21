"""The page's live panels: what each shows comes to the browser over one connection to the camera service.

Each panel is a Streamlit component (no iframe): `<name>.js` builds it and `<name>.css` dresses it; `link.js` and
`base.css` are common to all. Python gives a panel little: where the service is, a search's result, a conversation's
turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

_FOLDER = Path(__file__).parent
_HTML = '<div class="panel"></div>'


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def drawing(name: str, *, key: str, **data: Any) -> None:
    """Mount `name`, a picture that needs nothing but `data`: it plays in the browser, without the service.

    Args:
        name: Which; `<name>.js` and `<name>.css`.
        key: Of this one on its page.
        data: What it shows, JSON-serializable.
    """
    mount = st.components.v2.component(
        f"framechat_{name}", html=_HTML, css=_text("base.css") + _text(f"{name}.css"), js=_text(f"{name}.js")
    )
    mount(key=key, data=data)


def panel(
    name: str, *, service: dict[str, Any], on_action: Callable[[dict[str, Any]], None] | None = None, **data: Any
) -> None:
    """Mount the panel `name` (the name of its files).

    Args:
        name: Which panel; also its key, so that a rerun of the page updates it in place.
        service: {"url": str | None, "port": int}, how the browser reaches the service.
        on_action: Called with {"what": ..., ...} when the user pressed a button of the panel.
        data: What else the panel shows, JSON-serializable.
    """

    def acted() -> None:
        action = st.session_state[name].action
        if action is not None and on_action is not None:
            on_action(dict(action))

    mount = st.components.v2.component(
        f"framechat_{name}",
        html=_HTML,
        css=_text("base.css") + _text(f"{name}.css"),
        js=_text("link.js") + _text(f"{name}.js"),
    )
    mount(key=name, data={"service": service, **data}, on_action_change=acted)
