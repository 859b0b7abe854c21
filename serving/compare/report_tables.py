"""The report's tables, as HTML. Every text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

from serving.compare.summary import ArmResult, ClassResult, Figure, Pool, RatioResult, Summary
from serving.compare.words import NONE, class_names, duration, measured, span, times, told

_MEETS = {"yes": ("good", "met"), "no": ("bad", "not met"), "undecided": ("soft", "not sure yet")}


def text(value: object) -> str:
    """Any text as HTML that shows exactly that text."""
    return html.escape(str(value), quote=True)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, name: str, groups: Sequence[tuple[str, int]] = ()
) -> str:
    """A table that scrolls by itself; `head` is plain text, cells are HTML, the first of a row heads it.

    Args:
        groups: (words, columns): what stands above several columns.
    """
    heads = "".join(f"<th scope=col>{text(item)}</th>" for item in head)
    above = "".join(f"<th scope=colgroup colspan={columns}>{text(words)}</th>" for words, columns in groups)
    body = "".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>" for first, *rest in rows
    )
    top = (f"<tr class=groups>{above}</tr>" if above else "") + f"<tr>{heads}</tr>"
    return f'<div class=scroll><table aria-label="{text(name)}"><thead>{top}</thead><tbody>{body}</tbody></table></div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, HTML both, with room to wrap."""
    body = "".join(f"<tr><th scope=row>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f"<div class=scroll><table class=facts><tbody>{body}</tbody></table></div>"


def figure(found: Figure) -> str:
    """A duration with its interval below."""
    if found.value is None:
        return f"<span class=soft>{NONE}</span>"
    bounds = span(found)
    return duration(found.value) + (f"<small>{text(bounds)}</small>" if bounds else "")


def rate(found: Figure, digits: int = 2) -> str:
    """A rate with its interval below."""
    if found.value is None:
        return f"<span class=soft>{NONE}</span>"
    shown = f"{found.value:,.{digits}f}"
    if found.low is None or found.high is None:
        return shown
    return f"{shown}<small>{found.low:,.{digits}f} to {found.high:,.{digits}f}</small>"


def meets(answer: str) -> str:
    """Whether an objective is met, as a word with a colour."""
    kind, word = _MEETS[answer]
    return f"<span class={kind}>{word}</span>"


def name_of(arm: ArmResult) -> str:
    """An arm's name."""
    return text(arm.arm.name)


def overview(summary: Summary) -> str:
    """One row an arm; a refused one with its reason."""
    names = class_names(summary)
    head = ["", "objectives", *("TTFT p95", "ITL p99", "stalls/min", "good/s") * len(names), "out", "in"]
    groups = [("", 2), *((name, 4) for name in names), ("tokens/s", 2)]
    if not names:
        head, groups = head[:2], []
    rows = []
    for arm in summary.arms:
        if arm.arm.reason is not None:
            why = f"<span class=bad>refused</span><small class=wide>{text(arm.arm.reason)}</small>"
            rows.append([name_of(arm), why])
            continue
        if not arm.classes:
            rows.append([name_of(arm), "<span class=soft>no samples</span>"])
            continue
        cells = [name_of(arm), meets(arm.meets_all)]
        for name in names:
            cells += _class_cells(arm.classes.get(name))
        rows.append([*cells, rate(arm.output_tokens_per_s, 0), rate(arm.prompt_tokens_per_s, 0)])
    return table(head, rows, name="Arms", groups=groups)


def _class_cells(found: ClassResult | None) -> list[str]:
    if found is None:
        return [NONE] * 4
    return [
        figure(found.ttft.p95), figure(found.itl.p99), rate(found.stalls_per_min, 1),
        rate(found.goodput_per_s),
    ]  # fmt: skip


def percentiles(summary: Summary, traffic_class: str) -> str:
    """Every percentile of one class, one row a figure and arm."""
    arms = [(name_of(arm), arm.classes[traffic_class]) for arm in measured(summary) if traffic_class in arm.classes]
    figures: tuple[tuple[str, Callable[[ClassResult], tuple[Pool, str]]], ...] = (
        ("TTFT", lambda found: (found.ttft, meets(found.meets_ttft))),
        ("ITL", lambda found: (found.itl, meets(found.meets_itl))),
        ("ITL per token", lambda found: (found.itl_per_token, "")),
        ("TPOT", lambda found: (found.tpot, "")),
    )
    rows = []
    for label, take in figures:
        for name, found in arms:
            pool, answer = take(found)
            rows.append(
                [
                    f"<span class=soft>{label}</span> {name}", figure(pool.p50), figure(pool.p95), figure(pool.p99),
                    duration(pool.max_ms), f"{pool.samples:,}", answer,
                ]
            )  # fmt: skip
    return table(
        ["", "p50", "p95", "p99", "largest", "samples", "objective"], rows, name=f"Percentiles of {traffic_class}"
    )


def counts(summary: Summary) -> str:
    """What became of the requests, one row an arm and class."""
    rows = []
    for arm in measured(summary):
        for name, found in arm.classes.items():
            failed = ", ".join(f"{kind}: {number}" for kind, number in found.failed.items())
            rows.append(
                [
                    f"{name_of(arm)} <span class=soft>{text(name)}</span>", f"{found.requests:,}", f"{found.done:,}",
                    text(failed) or "0", f"{found.cancelled:,}", f"{found.unanswered:,}", f"{found.stalls:,}",
                    _mean(found.prompt_tokens_mean), _mean(found.image_tokens_mean),
                    _mean(found.completion_tokens_mean), _share(found.cached_share), _behind(found),
                ]
            )  # fmt: skip
    head = [
        "", "requests", "done", "failed", "cut at the end", "without a token", "stalls", "prompt tokens", "of pictures",
        "new tokens", "prompt cached", "waited in the client",
    ]  # fmt: skip
    return table(head, rows, name="Requests")


def quality(summary: Summary) -> str:
    """How good the measuring itself was, one row an arm that ran."""
    rows = []
    for arm in summary.arms:
        if not arm.blocks:
            continue
        invalid = "; ".join(f"block {number}: {reason}" for number, reason in arm.invalid.items())
        rows.append(
            [
                name_of(arm), f"{arm.blocks} in {arm.units} stretches", f"{arm.measured_s:,.0f} s",
                f'<span class="bad wide">{text(invalid)}</span>' if invalid else "none", duration(arm.loop_lag_p99_ms),
                duration(arm.sent_lag_p99_ms), f"{_mean(arm.requests_at_once_max)} / {_mean(arm.server_at_once_max)}",
                _mean(arm.count_difference_p95), _share(arm.prefix_hit_rate), _share(arm.multimodal_hit_rate),
                _share(arm.kv_cache_max), _mean(arm.preemptions),
            ]
        )  # fmt: skip
    head = [
        "", "blocks", "load that counts", "left out", "client's lag p99", "due to sent p99",
        "most at once, ours / server's", "counts apart p95", "prefix cache hits", "picture cache hits",
        "KV cache, most", "preemptions",
    ]  # fmt: skip
    return table(head, rows, name="Measuring")


def ratios(found: Iterable[RatioResult], *, name: str) -> str:
    """Arms against each other."""
    rows = [
        [
            f"{text(item.arm)} <span class=soft>by</span> {text(item.reference)}",
            text(f"{item.traffic_class} {item.figure.upper()} {item.percentile}"),
            text(times(item)),
            f"<span class={'good' if item.different else 'soft'}>{text(told(item))}</span>",
        ]
        for item in found
    ]
    return table(["", "figure", "ratio (95 %)", ""], rows, name=name)


def _mean(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}" if value == 0 or value >= 0.1 else f"{value:.1%}"


def _behind(found: ClassResult) -> str:
    parts = []
    if found.behind_turn:
        parts.append(f"{found.behind_turn:,} behind the turn before, {found.behind_turn_s:,.0f} s")
    if found.behind_cap:
        parts.append(f"{found.behind_cap:,} behind the cap, {found.behind_cap_s:,.0f} s")
    return "; ".join(parts) or "0"
