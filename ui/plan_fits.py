"""The tab "fits?": the KV cache of a model, what fits a GPU, how many requests at once, and what would change it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from pipeline.config import Config
from serving.capacity import MemoryBudget, MixPart, mix_concurrency
from serving.kvcache import KV_DTYPES
from serving.roofline import MACHINES
from ui.panels import plain
from ui.plan_formulas import AT_ONCE, BLOCKS, CACHE, KV_BYTES, PICTURES, POOL
from ui.plan_inputs import Subject, formulas, say_trouble, trouble
from ui.plan_kv import GIB, Fits, KVOptions, KVReport, mix_part, work_out

_MIX = [
    {"class": "camera", "share": 0.3, "prompt": 1100, "output": 32, "prefix": 100},
    {"class": "chat", "share": 0.7, "prompt": 400, "output": 200, "prefix": 30},
]
_TOKENS = {"cache tokens": st.column_config.NumberColumn(format="localized")}
_LENGTHS = (0.5, 1.0, 2.0, 4.0)
_MOST_LOG_BYTES = 8 * 2**20
_PARTS = (("weights", "#2f7de1"), ("activation peak", "#8b5cf6"), ("context, graphs", "#9aa4b2"), ("cache", "#178a4c"))


@st.fragment
def fits_tab(config: Config, subject: Subject) -> None:
    """Inputs on the left, figures on the right."""
    left, right = st.columns([0.36, 0.64], gap="medium")
    with left:
        options = _inputs(config, subject)
    with right, trouble():
        if options is None:
            return
        try:
            report = _worked_out(options)
        except ValueError as error:
            # What does not fit still has a size.
            say_trouble(error)
            report = _worked_out(replace(options, memory_gib=None, server_log=None, mix=()))
        _show(report, options)
        formulas(KV_BYTES, BLOCKS, CACHE, POOL, AT_ONCE, PICTURES)


@st.cache_data(max_entries=64, ttl=600, show_spinner="Working it out …")
def _worked_out(options: KVOptions) -> KVReport:
    return work_out(options)


def _inputs(config: Config, subject: Subject) -> KVOptions | None:
    server = config.serving.server
    by_hand = st.toggle("Give the shape by hand", key="fits_by_hand", help="Instead of a model's config.")
    one, two, three = st.columns(3)
    layers = heads = size = None
    if by_hand:
        layers = one.number_input("Layers", 1, 1000, 32, key="fits_layers")
        heads = two.number_input("KV heads", 1, 1024, 8, key="fits_heads")
        size = three.number_input("Head size", 1, 1024, 128, key="fits_size")
    offered = ["fp16", *(name for name in KV_DTYPES if name != "fp16")] if by_hand else ["auto", *KV_DTYPES]
    dtype = one.selectbox("Cache dtype", offered, key=f"fits_dtype_{by_hand}")
    tokens = two.number_input("Tokens a sequence", 1, 10_000_000, server.max_model_len, key="fits_tokens")
    sequences = three.number_input("Sequences", 1, 100_000, 1, key="fits_sequences")
    memory = one.number_input(
        "GPU memory, GiB",
        0.1,
        10_000.0,
        round(MACHINES[subject.gpu].memory_bytes / GIB, 1),
        key=f"fits_memory_{subject.gpu}",
    )
    utilization = two.number_input("Utilization", 0.05, 1.0, 0.9, 0.05, key="fits_utilization", help=CACHE)
    budget = three.number_input("Step budget", 1, 1_000_000, 2048, key="fits_budget")
    seqs = one.number_input("Most at once", 1, 1024, 128, key="fits_seqs", help="max_num_seqs")
    longest = two.number_input("Longest sequence", 1, 10_000_000, max(8192, server.max_model_len), key="fits_longest")
    weights = three.number_input(
        "Weights, GiB", 0.0, 10_000.0, 0.0, key="fits_weights", help="0: from the checkpoint, or counted."
    )
    activation = (
        one.number_input("Activation, GiB", 0.0, 1000.0, 0.0, key="fits_activation", help="0: estimated.")
        if by_hand
        else 0
    )
    st.markdown("**Mix of requests**, in tokens", help=AT_ONCE)
    table = st.data_editor(
        _MIX,
        num_rows="dynamic",
        hide_index=True,
        key="fits_mix",
        width="stretch",
        column_config={name: st.column_config.Column(width="small") for name in _MIX[0]},
    )
    st.markdown("**Cameras**", help=PICTURES)
    one, two, three, four = st.columns(4)
    width = one.number_input("Width, px", 1, 20_000, 1280, key="fits_width")
    height = two.number_input("Height, px", 1, 20_000, 720, key="fits_height")
    every = three.number_input("Every, s", 0.01, 86_400.0, 2.0, key="fits_every")
    cameras = four.number_input("Cameras", 1, 10_000, 4, key="fits_cameras")
    log = st.file_uploader(
        "A running server knows better: its start-up log",
        key="fits_log",
        max_upload_size=8,
        help="vLLM's log; its cache memory is taken.",
    )
    with trouble():
        return KVOptions(
            model=None if by_hand else subject.model,
            layers=layers,
            kv_heads=heads,
            head_size=size,
            dtype=dtype,
            tokens=tokens,
            sequences=sequences,
            tensor_parallel=subject.tensor_parallel,
            device="gpu",
            block_size=None,
            max_model_len=max(longest, tokens),
            memory_gib=memory,
            utilization=utilization,
            weights_gib=weights or None,
            activation_gib=activation or None,
            overhead_gib=None,
            server_log=_kept_log(log.getvalue()) if log is not None else None,
            budget=budget,
            max_num_seqs=seqs,
            mix=_mix(table),
            picture=f"{width}x{height}" if not by_hand else None,
            every_s=every,
            cameras=cameras,
        )
    return None


@st.cache_data(max_entries=8, show_spinner=False)
def _kept_log(content: bytes) -> Path:
    """An uploaded log as a file of this process."""
    if len(content) > _MOST_LOG_BYTES:
        raise ValueError(f"the log is larger than {_MOST_LOG_BYTES >> 20} MiB; its first lines suffice")
    with tempfile.NamedTemporaryFile(prefix="startup-", suffix=".log", delete=False) as file:
        file.write(content)
    return Path(file.name)


def _mix(table: list[dict[str, Any]]) -> tuple[str, ...]:
    """The table's rows as `framechat kv --mix` has them."""
    rows = []
    for number, row in enumerate(table, start=1):
        name, *values = (row.get(column) for column in _MIX[0])
        if any(value is None for value in values):
            raise ValueError(f"row {number} of the mix has an empty cell, allowed: a number in each")
        share, *lengths = (float(str(value)) for value in values)
        name = str(name or f"class {number}").replace(":", " ")
        rows.append(f"{name}:{share}:" + ":".join(str(int(value)) for value in lengths))
    return tuple(rows)


def _show(report: KVReport, options: KVOptions) -> None:
    size, fits = report.footprint, report.fits
    cells = st.columns(4)
    cells[0].metric("One token", f"{size.bytes_per_token:,} B", help=KV_BYTES)
    cells[1].metric(f"{size.sequences} × {size.tokens:,} tokens", _size(size.kv_bytes), help=KV_BYTES)
    cells[2].metric("in blocks, a GPU", _size(size.paged_bytes), help=BLOCKS)
    cells[3].metric("reserved in one piece", _size(size.contiguous_bytes), help=BLOCKS)
    if fits is None:
        return
    cells = st.columns(4)
    cells[0].metric("Cache", _size(fits.cache_bytes), help=CACHE)
    cells[1].metric("Tokens of cache", f"{fits.pool.tokens:,}", help=POOL)
    cells[2].metric("Longest sequences at once", f"{fits.pool.concurrency:,.1f}", help=POOL)
    if report.pictures is not None:
        picture = report.pictures
        cells[3].metric(
            "Image tokens a second",
            f"{picture.tokens_per_s:,.0f}",
            help=f"{picture.tokens_each:,} tokens a picture × {picture.per_s:g} pictures a second. {PICTURES}",
        )
    if fits.concurrency is not None:
        mix = fits.concurrency
        cells = st.columns(4)
        cells[0].metric("Requests at once, none preempted", f"{mix.at_worst:,}", help=AT_ONCE)
        cells[1].metric("… on average", f"{mix.on_average:,}", help=AT_ONCE)
        cells[2].metric(f"Risk of preemption with {mix.risk_seqs}", f"{mix.preemption_risk:.1%}", help=AT_ONCE)
        if report.pictures is not None:
            cells[3].metric("Tokens a picture", f"{report.pictures.tokens_each:,}", help=PICTURES)
    if fits.memory is not None:
        st.plotly_chart(
            _memory_figure(fits.memory, fits.cache_bytes),
            width="stretch",
            config={"displayModeBar": False},
            key="fits_memory_plot",
        )
    _moves(fits, options)
    if fits.advice:
        st.markdown("**What would let more of them run**")
        for advice in fits.advice:
            st.markdown(
                f"- {plain(advice.text)}: {advice.measure} **{advice.before:,g} → {advice.after:,g}**", help=AT_ONCE
            )


def _memory_figure(memory: MemoryBudget, cache_bytes: int) -> go.Figure:
    """Where the GPU's memory goes."""
    sizes = (memory.weight_bytes, memory.activation_bytes, memory.overhead_bytes, max(0, cache_bytes))
    figure = go.Figure()
    for (name, colour), size in zip(_PARTS, sizes, strict=True):
        guess = " (estimated)" if name in memory.estimated else ""
        figure.add_bar(
            y=[""], x=[size / GIB], name=f"{name}{guess}", orientation="h", marker_color=colour,
            text=f"{size / GIB:.1f}", textposition="inside", hovertemplate=f"{name}: %{{x:.2f}} GiB<extra></extra>",
        )  # fmt: skip
    figure.add_vline(x=memory.total_bytes / GIB, line_dash="dot", annotation_text="GPU memory")
    figure.update_layout(
        barmode="stack", height=150, margin={"l": 0, "r": 70, "t": 24, "b": 0}, xaxis_title="GiB",
        legend={"orientation": "h", "y": 1.35}, yaxis={"visible": False},
        xaxis={"range": [0, 1.02 * memory.total_bytes / GIB]},
    )  # fmt: skip
    return figure


def _moves(fits: Fits, options: KVOptions) -> None:
    """How the figures move with utilization, cache dtype and prompt length."""
    one, two, three = st.columns(3)
    if fits.by_utilization:
        shares = {"utilization": list(fits.by_utilization), "cache tokens": list(fits.by_utilization.values())}
        one.dataframe(shares, hide_index=True, height=180, column_config=_TOKENS)
    by_dtype: dict[str, list[Any]] = {"cache dtype": [], "cache tokens": []}
    for name in KV_DTYPES:
        found = _quietly(replace(options, dtype=name, mix=()))
        if found is not None and found.fits is not None:
            by_dtype["cache dtype"].append(name)
            by_dtype["cache tokens"].append(found.fits.pool.tokens)
    two.dataframe(by_dtype, hide_index=True, height=180, column_config=_TOKENS)
    if options.mix:
        rows: dict[str, list[Any]] = {"prompts": [], "at once": [], "risk": []}
        for factor in _LENGTHS:
            at_once = mix_concurrency(
                fits.layout,
                fits.pool,
                [_longer(mix_part(part), factor) for part in options.mix],
                max_num_seqs=options.max_num_seqs,
            )
            rows["prompts"].append(f"× {factor:g}")
            rows["at once"].append(at_once.at_worst)
            rows["risk"].append(f"{at_once.preemption_risk:.0%}")
        three.dataframe(rows, hide_index=True, height=180)


def _longer(part: MixPart, factor: float) -> MixPart:
    return replace(part, prompt_tokens=max(part.shared_prefix_tokens, round(part.prompt_tokens * factor)))


def _quietly(options: KVOptions) -> KVReport | None:
    """The report, or None where these options do not fit."""
    try:
        return _worked_out(options)
    except ValueError:
        return None


def _size(value: int) -> str:
    if abs(value) >= GIB // 10:
        return f"{value / GIB:,.2f} GiB"
    return f"{value / 2**20:,.1f} MiB"
