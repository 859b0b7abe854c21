"""What fits a GPU: memory to cache tokens to requests at once, for a mix of requests, and what would change it.

memory x utilization - weights - activation peak - the rest (CUDA context, communication buffers, captured graphs) is
what the engine leaves for the cache. The engine measures the peak in a dummy run at start-up; before there is a server
it can only be estimated, and the estimate says how. Where a server runs, take its own figure from its log instead
(`Available KV cache memory: ... GiB`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from serving.kvcache import CacheLayout, PoolSize, pool_size
from serving.modelshape import ModelShape, ShapeError

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The sampler's dummy run sorts the logits of every sequence: 32-bit logits, sorted copy, 64-bit indices, softmax,
# cumulative sum and masks. 10 x 4 bytes reproduces the two start-up logs with a known sampler peak in docs/planning.md.
_SAMPLER_BYTES_PER_LOGIT = 40
DEFAULT_OVERHEAD_BYTES = 768 * 2**20  # CUDA context and captured graphs: 0.2 to 1.8 GiB in the logs of docs/planning.md
_RISK_DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where one GPU's memory goes, in bytes. `estimated` names the parts that no server reported."""

    total_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    overhead_bytes: int
    estimated: tuple[str, ...] = ()

    @property
    def cache_bytes(self) -> int:
        """Left for the cache; negative when the model does not fit."""
        return (
            int(self.total_bytes * self.utilization) - self.weight_bytes - self.activation_bytes - self.overhead_bytes
        )


def activation_peak_bytes(shape: ModelShape, *, budget_tokens: int, max_num_seqs: int, tensor_parallel: int = 1) -> int:
    """Estimated peak of the engine's start-up run: the larger of one layer's MLP and the sampler.

    A gated MLP holds gate and up (2 x intermediate), their product (intermediate) and three hidden-sized buffers per
    token of the step budget; the sampler holds `_SAMPLER_BYTES_PER_LOGIT` per logit of `max_num_seqs` sequences. The
    image encoder is not in it.

    Raises:
        ShapeError: The config lacks a size that this needs.
    """
    missing = [
        name
        for name, value in (
            ("hidden_size", shape.hidden_size),
            ("intermediate_size", shape.intermediate_size),
            ("vocab_size", shape.vocab_size),
        )
        if value is None
    ]
    if missing or shape.hidden_size is None or shape.intermediate_size is None or shape.vocab_size is None:
        raise ShapeError(f"the activation peak needs {', '.join(missing)}, which the shape lacks; give it by hand")
    element = _ELEMENT_BYTES[shape.dtype or "bfloat16"]
    layer = budget_tokens * (3 * shape.intermediate_size // tensor_parallel + 3 * shape.hidden_size) * element
    return max(layer, max_num_seqs * shape.vocab_size * _SAMPLER_BYTES_PER_LOGIT)


def weights_bytes(shape: ModelShape, *, files_bytes: int | None, tensor_parallel: int = 1) -> int:
    """Weights on one GPU: from the checkpoint's files, or counted from a plain dense text model's config.

    Raises:
        ShapeError: Neither is known (experts, quantized or vision-language without files).
    """
    if files_bytes is not None:
        return files_bytes // tensor_parallel
    if shape.quantized:
        raise ShapeError("the weights are quantized, so their size is not in the config; give --weights-gib")
    if shape.has_vision:
        raise ShapeError("the image encoder's size is not counted from the config; give --weights-gib")
    if shape.text_parameters is None or shape.dtype is None:
        raise ShapeError("the weights' size is not counted for this family or dtype; give --weights-gib")
    return shape.text_parameters * _ELEMENT_BYTES[shape.dtype] // tensor_parallel


@dataclass(frozen=True, slots=True)
class MixPart:
    """Requests of one class: `share` of those running, with these lengths in tokens (images inside the prompt)."""

    name: str
    share: float
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0

    @property
    def final_tokens(self) -> int:
        """Tokens that the request holds when it ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of a mix a pool holds.

    Attributes:
        at_worst: Requests that fit however they fall together: each at its final length.
        on_average: Requests that fill the pool when their ages are spread over their decoding.
        preemption_risk: Chance that `max_num_seqs` running requests at random ages need more blocks than there are.
        risk_seqs: The number of requests that the risk is for.
    """

    at_worst: int
    on_average: int
    preemption_risk: float
    risk_seqs: int


def mix_concurrency(
    layout: CacheLayout, pool: PoolSize, mix: list[MixPart], *, max_num_seqs: int, seed: int = 0
) -> Concurrency:
    """Requests of a mix that fit a pool of blocks.

    A request that decodes holds its prompt and what it has written so far; its age is uniform over its output. A
    prefix that several requests share is held once. The risk is counted over seeded random draws of who runs and how
    far each is.

    Raises:
        ShapeError: The mix is empty or its shares are not positive.
    """
    if not mix or any(part.share <= 0 for part in mix):
        raise ShapeError("the mix is empty or has a share of zero or less")
    shares = np.array([part.share for part in mix], dtype=float)
    shares /= shares.sum()
    shared = sum(layout.blocks(part.shared_prefix_tokens) for part in mix if part.shared_prefix_tokens)
    free = pool.blocks - 1 - shared  # the engine keeps one block as the null block
    final = np.array([_own_blocks(layout, part, part.output_tokens) for part in mix])
    needs = [
        np.array([_own_blocks(layout, part, written) for written in range(0, part.output_tokens + 1)]) for part in mix
    ]
    middle = np.array([need.mean() for need in needs])
    rng = np.random.default_rng(seed)
    held = np.zeros(_RISK_DRAWS)
    classes = rng.choice(len(mix), size=(max_num_seqs, _RISK_DRAWS), p=shares)
    ages = rng.random((max_num_seqs, _RISK_DRAWS))
    for index, need in enumerate(needs):
        drawn = need[np.minimum((ages * len(need)).astype(int), len(need) - 1)]
        held += np.where(classes == index, drawn, 0).sum(axis=0)
    return Concurrency(
        at_worst=int(free // float(shares @ final)) if free > 0 else 0,
        on_average=int(free // float(shares @ middle)) if free > 0 else 0,
        preemption_risk=float(np.mean(held > free)),
        risk_seqs=max_num_seqs,
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, with the figure it would change: `measure` from `before` to `after`."""

    text: str
    measure: str
    before: float
    after: float


def advise(
    layout: CacheLayout,
    pool: PoolSize,
    mix: list[MixPart],
    *,
    max_num_seqs: int,
    document_tokens: int = 1000,
) -> list[Advice]:
    """Changes to the requests themselves that would let more of them run, largest gain first.

    `document_tokens` is the size of one retrieved passage, to say what one fewer would bring.
    """
    base = mix_concurrency(layout, pool, mix, max_num_seqs=max_num_seqs)
    found: list[Advice] = []

    def consider(text: str, changed: list[MixPart]) -> None:
        if not changed:
            return
        after = mix_concurrency(layout, pool, changed, max_num_seqs=max_num_seqs)
        if after.at_worst > base.at_worst:
            found.append(Advice(text, "requests at once without preemption", base.at_worst, after.at_worst))

    for index, part in enumerate(mix):
        rest = [*mix[:index], *mix[index + 1 :]]
        if part.shared_prefix_tokens == 0 and part.prompt_tokens >= 2 * layout.block_tokens:
            half = part.prompt_tokens // 2
            consider(
                f"{part.name}: put what is the same in every prompt first; if that is half of it ({half} tokens), the "
                "prefix is held once and prefilled once",
                [*rest, replace(part, shared_prefix_tokens=half)],
            )
        if part.prompt_tokens > 2 * document_tokens:
            consider(
                f"{part.name}: retrieve one passage of {document_tokens} tokens fewer",
                [*rest, replace(part, prompt_tokens=part.prompt_tokens - document_tokens)],
            )
        if part.output_tokens > layout.block_tokens:
            half = part.output_tokens // 2
            consider(
                f"{part.name}: cap the output at {half} tokens instead of {part.output_tokens}",
                [*rest, replace(part, output_tokens=half)],
            )
    longest = max(mix, key=lambda part: part.output_tokens)
    others = [part for part in mix if part is not longest]
    if others and longest.output_tokens >= 4 * max(part.output_tokens for part in others):
        consider(f"{longest.name}: serve these long outputs from an instance of their own", others)
    return sorted(found, key=lambda advice: advice.before - advice.after)


def sensitivities(
    layout: CacheLayout, memory: MemoryBudget, *, max_model_len: int, in_flight_tokens: int
) -> dict[float, int]:
    """Cache tokens by utilization, 0.5 to 0.98; those at which the engine would not start are left out."""
    tokens: dict[float, int] = {}
    for utilization in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98):
        changed = replace(memory, utilization=utilization)
        try:
            size = pool_size(
                layout, changed.cache_bytes, max_model_len=max_model_len, in_flight_tokens=in_flight_tokens
            )
        except ShapeError:
            continue
        tokens[utilization] = size.tokens
    return tokens


def _own_blocks(layout: CacheLayout, part: MixPart, written_tokens: int) -> int:
    """Blocks that a request holds by itself after `written_tokens` of output; whole shared blocks are not its own."""
    own = layout.blocks(part.prompt_tokens + written_tokens)
    return own - layout.blocks(part.shared_prefix_tokens // layout.block_tokens * layout.block_tokens)
