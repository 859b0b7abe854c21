"""What the tabs of the page "Plan" share: the deployment, the model and GPU chosen, and how trouble is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from pipeline.config import Config, ConfigError, load_config
from serving.compare.tables import ComparisonError
from serving.modelfiles import ModelFiles
from ui.panels import plain
from ui.plan_engine import open_model

CONFIGS = Path(__file__).parent.parent / "configs"
_OPTION = re.compile(r"--([a-z][a-z-]*)")
_KEPT = 32  # results of each kind


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned for."""

    model: str
    gpu: str
    tensor_parallel: int


@st.cache_resource
def deployment() -> Config:
    """The deployment that runs this page, or the sample deployment."""
    path = os.environ.get("FRAMECHAT_CONFIG")
    return load_config(Path(path) if path else CONFIGS / "sample.yaml", environ={})


@st.cache_data(max_entries=_KEPT, ttl=600, show_spinner="Reading the model's config …")
def model_files(name: str) -> ModelFiles:
    """The model's config, kept for ten minutes.

    Raises:
        ShapeError: It cannot be read.
    """
    return open_model(name)


@contextmanager
def trouble() -> Iterator[None]:
    """Show what is wrong with the input in one line, in place of what it would have given."""
    try:
        yield
    except (ValueError, OSError, ConfigError, ComparisonError) as error:
        say_trouble(error)


def say_trouble(error: Exception) -> None:
    """One line; options of the command line become names of fields."""
    line = " ".join(str(error).split())
    named = _OPTION.sub(lambda found: f"“{found.group(1).replace('-', ' ')}”", line)
    st.error(plain(named), icon=":material/error:")


def formulas(*texts: str) -> None:
    """How the figures above came to be."""
    with st.expander("Formulas and sources", icon=":material/function:"):
        for text in texts:
            st.markdown(text)
