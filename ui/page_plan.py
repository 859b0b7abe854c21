"""The page "Plan": what fits, which budget, and why. It needs neither a server nor the camera service."""

from __future__ import annotations

import streamlit as st

from serving.roofline import MACHINES
from ui.plan_budget import budget_tab
from ui.plan_fits import fits_tab
from ui.plan_inputs import Subject, deployment
from ui.plan_why import why_tab


def show() -> None:
    """Lay the page out: what is planned for, then the three questions."""
    config = deployment()
    st.subheader("Plan before you run")
    model, gpu, parallel, _ = st.columns([0.34, 0.16, 0.1, 0.4], vertical_alignment="bottom")
    name = model.text_input(
        "Model",
        value=config.serving.server.model,
        help="A folder with a config.json, a name on the Hugging Face hub (org/model), or `sample`, the bundled model.",
        max_chars=300,
        key="plan_model",
    )
    machine = gpu.selectbox(
        "GPU",
        list(MACHINES),
        index=list(MACHINES).index("l4"),
        key="plan_gpu",
        help="Peak, bandwidth and memory from its maker's datasheet.",
    )
    gpus = parallel.number_input("GPUs", 1, 64, 1, key="plan_tp", help="Tensor parallelism: GPUs that share the model.")
    subject = Subject(model=name.strip(), gpu=machine, tensor_parallel=int(gpus))
    fits, budget, why = st.tabs(["fits?", "which budget?", "why?"])
    with fits:
        fits_tab(config, subject)
    with budget:
        budget_tab(config, subject)
    with why:
        why_tab(config, subject)
