"""The tab "why?": a step time line, prefill and decode under the roofline, and chunked attention shown on tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st
import torch

from pipeline.config import Config
from serving.attention import KVCache, chunk_cost, in_chunks, one_pass
from serving.kvcache import kv_dtype, shard
from serving.modelshape import read_shape
from serving.roofline import Machine, ModelCost, find_machine, roofline_step_time, step_intensity
from serving.simulate import EngineSettings, Simulation, simulate
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import PlannedRequest
from ui.components import drawing
from ui.plan_engine import cost_of
from ui.plan_formulas import ATTENTION, ROOFLINE, SCHEDULE, STEP, TIMELINE
from ui.plan_inputs import Subject, formulas, model_files, trouble

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PREFILLS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
_DECODES = (1, 4, 16, 64, 256)
_CHAT_PROMPT_TOKENS = 40
_STEPS_BEFORE = 12  # of decoding, before the long prompt comes


def why_tab(_config: Config, subject: Subject) -> None:
    """Three pictures, one below the other; each is redrawn by itself."""
    _timeline(subject)
    left, right = st.columns(2, gap="medium")
    with left:
        _roofline(subject)
    with right:
        _attention(subject)


@st.cache_data(max_entries=32, ttl=600, show_spinner=False)
def _cost(subject: Subject) -> tuple[Machine, ModelCost]:
    return find_machine(subject.gpu), cost_of(model_files(subject.model), tensor_parallel=subject.tensor_parallel)


@st.fragment
def _timeline(subject: Subject) -> None:
    st.markdown("**One long prompt among chats, in one pass and in chunks**", help=TIMELINE)
    one, two, three, four, _ = st.columns([0.15, 0.15, 0.15, 0.15, 0.4])
    prompt = int(one.number_input("Long prompt, tokens", 64, 32_768, 2048, 64, key="why_prompt"))
    budget = int(two.number_input("Budget of a step", 16, 32_768, 256, 16, key="why_budget"))
    chats = int(three.number_input("Chats", 1, 8, 3, key="why_chats"))
    answer = int(four.number_input("Tokens an answer", 8, 96, 40, key="why_answer"))
    with trouble():
        if budget < chats + 1:
            raise ValueError(f"the budget is {budget}, allowed: above the number of chats, which need a token each")
        machine, cost = _cost(subject)
        film = _film(roofline_step_time(machine, cost), prompt, budget, chats, answer)
        drawing("schedule", key="schedule", **film)
        st.caption(
            f"{subject.model} on {subject.gpu}, slowed down to be seen. Step times: "
            f"{roofline_step_time(machine, cost).source}."
        )
        formulas(TIMELINE, SCHEDULE, STEP)


@st.cache_data(max_entries=64, show_spinner="Simulating …")
def _film(step_time: StepTime, prompt: int, budget: int, chats: int, answer: int) -> dict[str, Any]:
    """Both schedules of the same requests, as the component draws them."""
    decode = np.zeros(len(FEATURE_NAMES))
    decode[:4] = 1, chats, 0, chats * (_CHAT_PROMPT_TOKENS + answer / 2)
    due_s = _STEPS_BEFORE * step_time.seconds(decode)
    planned = [PlannedRequest(number, "chat", 0.0, _CHAT_PROMPT_TOKENS + number, answer) for number in range(chats)]
    planned.append(PlannedRequest(chats, "camera", due_s, prompt, 8))
    whole = prompt + sum(request.text_tokens for request in planned)
    base = EngineSettings(
        budget_tokens=budget, cache_blocks=2 * whole // 16 + 64 * len(planned), max_model_len=2 * whole + 1024,
        prefix_caching=False,
    )  # fmt: skip
    scenes = []
    for title, tokens in (("One pass", max(whole, budget)), ("In chunks", budget)):
        result = simulate(planned, replace(base, budget_tokens=tokens), step_time, log_limit=100_000)
        scenes.append(_scene(title, tokens, result))
    return {"scenes": scenes, "names": [*(f"chat {number + 1}" for number in range(chats)), "long prompt"]}


def _scene(title: str, budget: int, result: Simulation) -> dict[str, Any]:
    chat, camera = (
        next(item for item in result.classes() if item.traffic_class == name) for name in ("chat", "camera")
    )
    starts, lengths = result.steps[:, len(FEATURE_NAMES)], result.steps[:, len(FEATURE_NAMES) + 1]
    seen = [0] * len(result.planned)
    bars = []
    for step, request, tokens, _ in result.schedule.tolist():
        before, length = seen[request], int(result.prompt_tokens[request])
        seen[request] += tokens
        last = request == len(result.planned) - 1
        kind = "decode" if before >= length else "prefill" if last else "short"
        bars.append(
            [
                request,
                round(float(starts[step]), 7),
                round(float(lengths[step]), 7),
                tokens,
                kind,
                seen[request] >= length,
            ]
        )
    worst, first = chat.itl.max_s or 0.0, camera.ttft.p50_s or 0.0
    return {
        "title": f"{title}, budget {budget:,}: longest gap of a chat {_time(worst)}, "
        f"first token of the long prompt after {_time(first)}",
        "bars": bars,
        "end_s": result.span_s,
    }


@st.fragment
def _roofline(subject: Subject) -> None:
    st.markdown("**Prefill and decode under the roofline**", help=ROOFLINE)
    context = int(st.number_input("Context of each decode, tokens", 1, 131_072, 512, key="why_context"))
    with trouble():
        machine, cost = _cost(subject)
        figure = go.Figure()
        grid = np.logspace(-1, 4, 120)
        figure.add_scatter(
            x=grid, y=np.minimum(grid * machine.bytes_per_s, machine.flops_per_s) / 1e12, mode="lines",
            name=f"{machine.name}: the most it can", line={"color": "#9aa4b2", "width": 2}, hoverinfo="skip",
        )  # fmt: skip
        kinds: list[tuple[str, str, dict[int, dict[str, Any]]]] = [
            ("prefill chunk, tokens", "#d97706", {n: {"decode_contexts": [], "prefill_tokens": n} for n in _PREFILLS}),
            ("decodes at once", "#2f7de1", {n: {"decode_contexts": [context] * n} for n in _DECODES}),
        ]
        for name, colour, steps in kinds:
            found = [step_intensity(machine, cost, **step) for step in steps.values()]
            reached = [min(item.flops_per_byte * machine.bytes_per_s, machine.flops_per_s) / 1e12 for item in found]
            bound = ["compute-bound" if item.compute_bound else "memory-bound" for item in found]
            figure.add_scatter(
                x=[item.flops_per_byte for item in found], y=reached, mode="markers+text", name=name,
                text=[f"{number:,}" for number in steps], textposition="bottom right", customdata=bound,
                marker={"size": 9, "color": colour, "symbol": "circle" if name.startswith("p") else "diamond"},
                hovertemplate="%{text}: %{x:,.1f} FLOP a byte, %{customdata}<extra></extra>",
            )  # fmt: skip
        figure.add_vline(x=machine.ratio, line_dash="dot", line_color="#9aa4b2")
        figure.add_annotation(
            x=np.log10(machine.ratio),
            y=0.03,
            yref="paper",
            showarrow=False,
            xanchor="left",
            text=f" {machine.ratio:,.0f} FLOP a byte",
        )
        figure.update_xaxes(type="log", title="FLOP a byte moved", dtick=1)
        figure.update_yaxes(type="log", title="TFLOP/s at most", dtick=1)
        figure.update_layout(
            height=400, margin={"l": 0, "r": 20, "t": 8, "b": 0}, legend={"orientation": "h", "y": -0.25}
        )
        st.plotly_chart(figure, width="stretch", key="why_roofline", config={"displayModeBar": False})
        st.caption(
            f"{subject.model} on {machine.name}: left of the dotted line a step is memory-bound, right of it "
            "compute-bound. Decodes ride along with a prefill almost for free as long as it is left of the line."
        )
        formulas(ROOFLINE)


@dataclass(frozen=True, slots=True)
class _Proof:
    error: float
    scale: float
    read_bytes: int


@st.fragment
def _attention(subject: Subject) -> None:
    st.markdown("**The same attention in chunks, on tensors, now**", help=ATTENTION)
    one, two, three, four = st.columns(4)
    tokens = int(one.number_input("Prompt, tokens", 2, 2048, 1000, key="why_tokens"))
    chunk = int(two.number_input("Chunk, tokens", 1, 2048, 256, key="why_chunk"))
    heads = three.selectbox("Heads / KV heads", ["9 / 3", "8 / 8", "8 / 2", "8 / 1"], key="why_heads")
    dtype = four.selectbox("Dtype", list(_TORCH_DTYPES), key="why_dtype")
    with trouble():
        all_heads, kv_heads = (int(part) for part in heads.split("/"))
        proof = _proof(tokens, chunk, all_heads, kv_heads, dtype)
        cells = st.columns(3)
        cells[0].metric("Chunks", f"{-(-tokens // chunk)}", help=ATTENTION)
        cells[1].metric(
            "Largest difference", f"{proof.error:.1e}", help=f"of values up to {proof.scale:.2g}. {ATTENTION}"
        )
        cells[2].metric("KV read here", f"{proof.read_bytes / 2**20:,.2f} MiB", help=ATTENTION)
        shape = read_shape(model_files(subject.model).config)
        element = kv_dtype("auto", shape.dtype)
        per_gpu = shard(shape, subject.tensor_parallel)
        token_bytes = sum(group.layers * group.kv_heads * element.cell_bytes(group) for group in per_gpu.groups)
        sizes = sorted({size for size in (32, 64, 128, 256, 512, 1024, chunk) if size <= tokens} | {tokens})
        costs = [chunk_cost(tokens, size, token_bytes) for size in sizes]
        st.dataframe(
            {
                "chunk": [item.chunk_tokens for item in costs],
                "chunks": [item.chunks for item in costs],
                "KV read, MiB": [round(item.read_bytes / 2**20, 1) for item in costs],
                "read again, MiB": [round(item.again_bytes / 2**20, 1) for item in costs],
            },
            hide_index=True,
            height=215,
            key="why_costs",
        )
        st.caption(f"Reads of {subject.model}'s own cache for a prompt of {tokens:,} tokens, a GPU.")
        formulas(ATTENTION)


@st.cache_data(max_entries=64, show_spinner="Computing both …")
def _proof(tokens: int, chunk: int, heads: int, kv_heads: int, dtype: str) -> _Proof:
    """Attention of random tensors both ways."""
    generator = torch.Generator().manual_seed(0)
    kind = _TORCH_DTYPES[dtype]
    queries, keys, values = (
        torch.randn(count, tokens, 64, generator=generator).to(kind) for count in (heads, kv_heads, kv_heads)
    )
    cache = KVCache(kv_heads, tokens, 64, kind)
    whole = one_pass(queries, keys, values)
    pieces = in_chunks(queries, keys, values, chunk, cache=cache)
    return _Proof(
        error=float((whole.double() - pieces.double()).abs().max()),
        scale=float(whole.double().abs().max()),
        read_bytes=cache.bytes_read,
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
