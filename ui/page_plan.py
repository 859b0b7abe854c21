"""The page "Plan": what fits, which budget, and why."""

from __future__ import annotations

import streamlit as st


def show() -> None:
    """Lay the page out."""
    st.title("Plan")
