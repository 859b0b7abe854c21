"""The FrameChat pages and the links between them.

Run by `framechat up` or `framechat ui`. The page "Live" reads FRAMECHAT_SERVICE_URL, where this process reaches the
camera service, and FRAMECHAT_PUBLIC_URL, where browsers reach it when that is not the page's own host at the service's
port.
"""

from __future__ import annotations

import streamlit as st

from ui import page_compare, page_live, page_plan
from ui.components import panel

# Streamlit's own margins would cost a laptop a fifth of the screen. The links to the pages and Streamlit's menu lie
# over the right end of each page's first line, which leaves a fifth of itself free for them.
_FRAME = """
<style>
.stMainBlockContainer { padding: 0.55rem 1rem 0.5rem; max-width: none; position: relative; }
.stMainBlockContainer .stVerticalBlock { gap: 12px; }
.stAppHeader { inset: 0 0.5rem auto auto; width: 220px; height: 56px; min-height: 0; background: transparent; }
.stAppHeader, .stAppToolbar { pointer-events: none; padding: 0; }
.stAppHeader .stMainMenu { pointer-events: auto; }
[data-testid="stLayoutWrapper"]:has(> .st-key-pages) {
  position: absolute; top: 0.8rem; right: 4rem; width: auto; z-index: 6;
}
.st-key-pages { width: auto; flex-wrap: nowrap; align-items: center; gap: 0.2rem; }
.st-key-pages a[aria-current] p { font-weight: 650; }
.stStatusWidget { display: none; }
[data-stale="true"] { opacity: 1 !important; }
.stElementContainer:has(style) { display: none; }
</style>
"""


def main() -> None:
    """Show the page that the address names."""
    st.set_page_config(page_title="FrameChat", layout="wide", initial_sidebar_state="collapsed")
    st.html(_FRAME)
    pages = [
        st.Page(page_live.show, title="Live", url_path="live", default=True),
        st.Page(page_compare.show, title="Compare", url_path="compare"),
        st.Page(page_plan.show, title="Plan", url_path="plan"),
    ]
    chosen = st.navigation(pages, position="hidden")
    with st.container(horizontal=True, key="pages"):
        for page in pages:
            st.page_link(page)
    if chosen is not pages[0]:  # the page "Live" says so in its own first line
        panel("simulated", service=page_live.service(page_live.service_url()))
    chosen.run()


main()
