"""What `framechat kv` works out and prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serving.capacity import (
    DEFAULT_OVERHEAD_BYTES,
    Advice,
    Concurrency,
    MemoryBudget,
    MixPart,
    activation_peak_bytes,
    advise,
    mix_concurrency,
    sensitivities,
    weights_bytes,
)
from serving.config import ImageTokens
from serving.kvcache import (
    DEFAULT_BLOCK_TOKENS,
    CacheLayout,
    Footprint,
    PoolSize,
    cache_layout,
    footprint,
    kv_dtype,
    pool_size,
)
from serving.modelfiles import ModelFiles, image_rule
from serving.modelshape import ModelShape, ShapeError, plain_shape, read_shape
from serving.startuplog import read_startup_log
from ui.plan_engine import open_model

GIB = 2**30
WIDTH = 120  # of piped output, which has no terminal to fit


@dataclass(frozen=True, slots=True)
class KVOptions:
    """What `framechat kv` was asked, as on its command line."""

    model: str | None
    layers: int | None
    kv_heads: int | None
    head_size: int | None
    dtype: str
    tokens: int
    sequences: int
    tensor_parallel: int
    device: str
    block_size: int | None
    max_model_len: int | None
    memory_gib: float | None
    utilization: float
    weights_gib: float | None
    activation_gib: float | None
    overhead_gib: float | None
    server_log: Path | None
    budget: int
    max_num_seqs: int
    mix: tuple[str, ...]
    picture: str | None
    every_s: float
    cameras: int


def run_kv(options: KVOptions, *, as_json: bool) -> None:
    """Work the options out and print them.

    Raises:
        ValueError: (or `ShapeError`, `OSError`) The options cannot be worked out; the message is one line.
    """
    report = work_out(options)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        report.show(Console(width=None if sys.stdout.isatty() else WIDTH))


def work_out(options: KVOptions) -> KVReport:
    """Everything that the options ask for.

    Raises:
        ValueError: (or `ShapeError`, `OSError`) They cannot be worked out; the message is one line.
    """
    files, shape = _shape(options)
    if options.device not in DEFAULT_BLOCK_TOKENS:
        raise ShapeError(f"--device is {options.device!r}, allowed: {', '.join(DEFAULT_BLOCK_TOKENS)}")
    block_tokens = options.block_size if options.block_size is not None else DEFAULT_BLOCK_TOKENS[options.device]
    element = kv_dtype(options.dtype, shape.dtype)
    size = footprint(
        shape,
        element,
        tokens=options.tokens,
        sequences=options.sequences,
        tensor_parallel=options.tensor_parallel,
        block_tokens=block_tokens,
        reserve_tokens=options.max_model_len,
    )
    report = KVReport(options.model or "a shape given by hand", element.name, shape, size)
    if options.picture is not None:
        report.pictures = _pictures(files, options.picture, options.every_s, options.cameras)
    if options.memory_gib is not None or options.server_log is not None:
        layout = cache_layout(shape, element, block_tokens=block_tokens, tensor_parallel=options.tensor_parallel)
        memory = None if options.server_log is not None else _memory(shape, files, options)
        cache = _cache_of_log(options.server_log) if options.server_log is not None else None
        report.fits = _fits(layout, memory.cache_bytes if memory is not None else cache or 0, memory, options)
    return report


@dataclass(frozen=True, slots=True)
class PictureRate:
    """Tokens of one picture, and how many pictures come a second."""

    tokens_each: int
    per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Image tokens a second."""
        return self.tokens_each * self.per_s


@dataclass(frozen=True, slots=True)
class Fits:
    """What fits the memory: the pool, and how many requests of the mix. Sizes in bytes."""

    pool: PoolSize
    layout: CacheLayout
    cache_bytes: int
    memory: MemoryBudget | None
    concurrency: Concurrency | None
    advice: list[Advice]
    by_utilization: dict[float, int]


@dataclass(slots=True)
class KVReport:
    """Everything one `framechat kv` found."""

    model: str
    dtype: str
    shape: ModelShape
    footprint: Footprint
    pictures: PictureRate | None = None
    fits: Fits | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        found: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "groups": [asdict(group) for group in self.shape.groups],
            **asdict(self.footprint),
            "paged_waste_bytes": self.footprint.paged_waste_bytes,
            "saved_bytes": self.footprint.saved_bytes,
        }
        if self.pictures is not None:
            found["picture_tokens"] = self.pictures.tokens_each
            found["picture_tokens_per_s"] = self.pictures.tokens_per_s
        if self.fits is not None:
            fits = self.fits
            found["capacity"] = {
                "cache_bytes": fits.cache_bytes,
                "block_bytes": fits.layout.block_bytes,
                **asdict(fits.pool),
                "memory": asdict(fits.memory) if fits.memory else None,
                "mix": asdict(fits.concurrency) if fits.concurrency else None,
                "advice": [asdict(advice) for advice in fits.advice],
                "tokens_by_utilization": fits.by_utilization,
            }
        return found

    def show(self, console: Console) -> None:
        """As tables."""
        size = self.footprint
        table = Table(title=f"KV cache of {self.model} in {self.dtype}", show_header=False)
        for group in self.shape.groups:
            window = f", window {group.window_tokens}" if group.window_tokens else ""
            table.add_row(
                f"{group.layers} layers {group.kind}{window}",
                f"{group.kv_heads} KV heads of {group.key_size} + {group.value_size}",
            )
        table.add_row("one token", f"{size.bytes_per_token:,} bytes")
        table.add_row(f"{size.sequences} x {size.tokens:,} tokens", f"{size.kv_bytes:,} bytes = {_gib(size.kv_bytes)}")
        if size.tensor_parallel > 1:
            table.add_row(f"on each of {size.tensor_parallel} GPUs", _gib(size.per_gpu_bytes))
        table.add_row(f"in blocks of {size.block_tokens} tokens", f"{_gib(size.paged_bytes)} a GPU")
        table.add_row(
            f"reserved in one piece for {size.reserve_tokens:,} tokens", f"{_gib(size.contiguous_bytes)} a GPU"
        )
        if self.pictures is not None:
            table.add_row("one picture", f"{self.pictures.tokens_each:,} tokens")
            table.add_row("pictures a second", f"{self.pictures.per_s:g} = {self.pictures.tokens_per_s:,.0f} tokens/s")
        console.print(table)
        if self.fits is not None:
            _show_fits(console, self.fits)


def _show_fits(console: Console, fits: Fits) -> None:
    table = Table(title="What fits", show_header=False)
    if fits.memory is not None:
        memory = fits.memory
        table.add_row("memory x utilization", _gib(int(memory.total_bytes * memory.utilization)))
        for name, value in (
            ("weights", memory.weight_bytes),
            ("activation peak", memory.activation_bytes),
            ("context, graphs", memory.overhead_bytes),
        ):
            table.add_row(f"- {name}{' (estimated)' if name in memory.estimated else ''}", _gib(value))
    table.add_row("cache", _gib(fits.cache_bytes))
    table.add_row("cache tokens", f"{fits.pool.tokens:,} ({fits.pool.blocks:,} blocks)")
    table.add_row("longest sequences at once", f"{fits.pool.concurrency:.2f}")
    if fits.concurrency is not None:
        mix = fits.concurrency
        table.add_row("requests of the mix at once, none preempted", f"{mix.at_worst:,}")
        table.add_row("... on average", f"{mix.on_average:,}")
        table.add_row(f"risk of preemption with {mix.risk_seqs} running", f"{mix.preemption_risk:.1%}")
    console.print(table)
    if fits.by_utilization:
        console.print(
            "Cache tokens by utilization: "
            + ", ".join(f"{share:g}: {tokens:,}" for share, tokens in fits.by_utilization.items())
        )
    for advice in fits.advice:
        console.print(f"- {advice.text}: {advice.measure} {advice.before:g} -> {advice.after:g}", soft_wrap=True)


def _shape(options: KVOptions) -> tuple[ModelFiles | None, ModelShape]:
    by_hand = (options.layers, options.kv_heads, options.head_size)
    if options.model is not None:
        if any(value is not None for value in by_hand):
            raise ShapeError("give either MODEL or --layers, --kv-heads and --head-size, not both")
        files = open_model(options.model)
        return files, read_shape(files.config)
    layers, kv_heads, head_size = by_hand
    if layers is None or kv_heads is None or head_size is None:
        raise ShapeError("give MODEL, or all of --layers, --kv-heads and --head-size")
    if options.dtype == "auto":
        raise ShapeError("--dtype is auto, which needs MODEL; give for example --dtype fp16")
    return None, plain_shape(layers, kv_heads, head_size)


def _memory(shape: ModelShape, files: ModelFiles | None, options: KVOptions) -> MemoryBudget:
    if options.memory_gib is None or options.memory_gib <= 0 or not 0 < options.utilization <= 1:
        raise ShapeError("--memory-gib must be above 0 and --utilization above 0, at most 1")
    estimated = []
    if options.weights_gib is not None:
        weights = int(options.weights_gib * GIB)
    else:
        in_files = files.weight_bytes if files is not None else None
        weights = weights_bytes(shape, files_bytes=in_files, tensor_parallel=options.tensor_parallel)
        if in_files is None:
            estimated.append("weights")
    if options.activation_gib is not None:
        activation = int(options.activation_gib * GIB)
    else:
        activation = activation_peak_bytes(
            shape,
            budget_tokens=options.budget,
            max_num_seqs=options.max_num_seqs,
            tensor_parallel=options.tensor_parallel,
        )
        estimated.append("activation peak")
    if options.overhead_gib is None:
        estimated.append("context, graphs")
    return MemoryBudget(
        total_bytes=int(options.memory_gib * GIB),
        utilization=options.utilization,
        weight_bytes=weights,
        activation_bytes=activation,
        overhead_bytes=DEFAULT_OVERHEAD_BYTES if options.overhead_gib is None else int(options.overhead_gib * GIB),
        estimated=tuple(estimated),
    )


def _fits(layout: CacheLayout, cache_bytes: int, memory: MemoryBudget | None, options: KVOptions) -> Fits:
    longest, seqs = options.max_model_len or options.tokens, options.max_num_seqs
    in_flight = options.budget * (2 if options.device == "gpu" else 1)  # a GPU server has two steps in flight
    mix = [mix_part(item) for item in options.mix]
    pool = pool_size(layout, cache_bytes, max_model_len=longest, in_flight_tokens=in_flight)
    return Fits(
        pool=pool,
        layout=layout,
        cache_bytes=cache_bytes,
        memory=memory,
        concurrency=mix_concurrency(layout, pool, mix, max_num_seqs=seqs) if mix else None,
        advice=advise(layout, pool, mix, max_num_seqs=seqs) if mix else [],
        by_utilization=sensitivities(layout, memory, max_model_len=longest, in_flight_tokens=in_flight)
        if memory
        else {},
    )


def _cache_of_log(path: Path) -> int:
    found = read_startup_log(path.read_text(errors="replace")).cache_bytes
    if found is None:
        raise ShapeError(f"{path.name} does not say how much memory the KV cache got")
    return found


def mix_part(text: str) -> MixPart:
    """A class of requests from NAME:SHARE:PROMPT:OUTPUT[:PREFIX]; raises ShapeError for anything else."""
    fields = text.split(":")
    if len(fields) not in (4, 5):
        raise ShapeError(f"--mix is {text!r}, allowed: NAME:SHARE:PROMPT:OUTPUT[:PREFIX], such as chat:0.8:400:200")
    try:
        share, numbers = float(fields[1]), [int(value) for value in fields[2:]]
    except ValueError:
        raise ShapeError(f"--mix is {text!r}, where a number was expected after the name") from None
    if min(numbers) < 0 or (len(numbers) == 3 and numbers[2] > numbers[0]):
        raise ShapeError(f"--mix is {text!r}, allowed: lengths of 0 or more, the prefix within the prompt")
    return MixPart(fields[0], share, *numbers)


def _pictures(files: ModelFiles | None, size: str, every_s: float, cameras: int) -> PictureRate:
    if every_s <= 0 or cameras < 1:
        raise ShapeError("--every-s must be above 0 and --cameras 1 or more")
    try:
        width, height = (int(value) for value in size.lower().split("x"))
    except ValueError:
        raise ShapeError(f"--picture is {size!r}, allowed: WIDTHxHEIGHT in pixels, such as 1280x720") from None
    rule = image_rule(files) if files is not None else ImageTokens()
    return PictureRate(tokens_each=rule.count(width, height), per_s=cameras / every_s)


def _gib(value: int) -> str:
    return f"{value / GIB:,.2f} GiB" if abs(value) >= GIB // 10 else f"{value / 2**20:,.2f} MiB"
