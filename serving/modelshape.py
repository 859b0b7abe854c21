"""The shape of a model as far as its KV cache and its arithmetic need it, read from the model's own config.json.

Nothing is guessed: a family whose cache this module does not know, or a config that lacks a size, raises `ShapeError`
with what is missing. Sizes that a family's configuration class fills in when the file leaves them out (for example
Gemma 3's head counts) are listed here per family, as in the classes of Hugging Face transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ShapeError(ValueError):
    """The shape cannot be read exactly; the message is one line and says what is missing."""


class LayerKind(StrEnum):
    """What a layer keeps of the tokens before."""

    FULL = "full"  # keys and values of every token
    SLIDING = "sliding"  # of the last `window_tokens` tokens
    CHUNKED = "chunked"  # of the tokens of the current chunk of `window_tokens`
    LATENT = "latent"  # one compressed vector per token for all heads (multi-head latent attention)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` layers that cache alike.

    Attributes:
        key_size: Elements of one key head; for `LATENT`, of the whole latent (kv_lora_rank + qk_rope_head_dim).
        value_size: Elements of one value head; 0 for `LATENT`, whose values are part of the latent.
        window_tokens: For `SLIDING` and `CHUNKED`, how many tokens a layer looks back over.
    """

    kind: LayerKind
    layers: int
    kv_heads: int
    key_size: int
    value_size: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder as the engine caches it. `groups` are in the order of their first layer.

    Attributes:
        dtype: What the config says the weights are (`float16`, `bfloat16`, `float32`), or None.
        text_parameters: Weights of the language model counted from the config; None where the family's blocks are
            not plain (experts, latent attention) and so cannot be counted from the config alone.
        has_vision: There is an image encoder besides the language model counted here.
        quantized: The checkpoint's weights are not stored in `dtype`.
    """

    model_type: str
    groups: tuple[LayerGroup, ...]
    hidden_size: int | None = None
    intermediate_size: int | None = None
    attention_heads: int | None = None
    vocab_size: int | None = None
    max_position: int | None = None
    dtype: str | None = None
    text_parameters: int | None = None
    has_vision: bool = False
    quantized: bool = False

    @property
    def layers(self) -> int:
        """Layers that keep a cache."""
        return sum(group.layers for group in self.groups)


def plain_shape(layers: int, kv_heads: int, head_size: int) -> ModelShape:
    """Shape of full-attention layers given by hand: every layer alike, keys and values of one size."""
    for name, value in (("layers", layers), ("kv-heads", kv_heads), ("head-size", head_size)):
        if value < 1:
            raise ShapeError(f"{name} is {value}, allowed: 1 or more")
    group = LayerGroup(LayerKind.FULL, layers, kv_heads, head_size, head_size)
    return ModelShape(model_type="given by hand", groups=(group,))


@dataclass(frozen=True, slots=True)
class _Family:
    """How a model_type lays out its layers, and the sizes its configuration class supplies when absent."""

    pattern: str = "full"
    defaults: tuple[tuple[str, Any], ...] = ()
    dense: bool = True  # gated MLP and no experts, so parameters can be counted


_GEMMA3 = (
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("sliding_window", 4096),
    ("sliding_window_pattern", 6),
    ("num_hidden_layers", 26),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("vocab_size", 262_208),
    ("max_position_embeddings", 131_072),
    ("tie_word_embeddings", True),
)
_GEMMA2 = (("sliding_window_pattern", 2), ("sliding_window", 4096), ("head_dim", 256), ("tie_word_embeddings", True))
_GPT_OSS = (("sliding_window_pattern", 2), ("sliding_window", 128), ("head_dim", 64))
_QWEN3 = (("head_dim", 128),)
_QWEN_VL_TEXT = (("use_sliding_window", False),)
_LLAMA4 = (
    ("num_attention_heads", 40),
    ("num_key_value_heads", 8),
    ("head_dim", 128),
    ("attention_chunk_size", 8192),
    ("no_rope_layer_interval", 4),
)

# model_type -> family. Layer patterns as vLLM 0.32 builds its attention layers.
_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "smollm3": _Family(),
    "granite": _Family(),
    "olmo": _Family(),
    "olmo2": _Family(),
    "internlm2": _Family(),
    "stablelm": _Family(dense=False),
    "gemma": _Family(defaults=(("tie_word_embeddings", True),)),
    "mistral": _Family("uniform_window", (("num_key_value_heads", 8),)),
    "mixtral": _Family("uniform_window", (("num_key_value_heads", 8),), dense=False),
    "phi3": _Family("uniform_window"),
    "starcoder2": _Family("uniform_window", dense=False),
    "qwen2": _Family("qwen_window"),
    "qwen2_moe": _Family("qwen_window", dense=False),
    "qwen3": _Family("qwen_window", _QWEN3),
    "qwen3_moe": _Family("qwen_window", _QWEN3, dense=False),
    "qwen2_vl_text": _Family("qwen_window", _QWEN_VL_TEXT),
    "qwen2_5_vl_text": _Family("qwen_window", _QWEN_VL_TEXT),
    "qwen3_vl_text": _Family("full", _QWEN3),
    "qwen3_vl_moe_text": _Family("full", _QWEN3, dense=False),
    "gemma2": _Family("alternating", _GEMMA2),
    "gemma3_text": _Family("alternating", _GEMMA3),
    "cohere2": _Family("alternating", (("sliding_window_pattern", 4),), dense=False),
    "gpt_oss": _Family("alternating", _GPT_OSS, dense=False),
    "llama4_text": _Family("llama4", _LLAMA4, dense=False),
    "falcon": _Family("falcon", dense=False),
    "gpt_bigcode": _Family("gpt2", dense=False),
    "gpt2": _Family("gpt2", dense=False),
    "opt": _Family(dense=False),
    "phi": _Family(dense=False),
    "gpt_neox": _Family(dense=False),
    "deepseek_v2": _Family("latent", dense=False),
    "deepseek_v3": _Family("latent", dense=False),
    "kimi_k2": _Family("latent", dense=False),
}
# model_type of a vision-language model -> (key of its text part, model_type of the text part when it names none)
_TEXT_PARTS: dict[str, tuple[str, str]] = {
    "idefics3": ("text_config", "llama"),
    "smolvlm": ("text_config", "llama"),
    "llava": ("text_config", "llama"),
    "llava_next": ("text_config", "llama"),
    "mistral3": ("text_config", "mistral"),
    "qwen2_vl": ("text_config", "qwen2_vl_text"),
    "qwen2_5_vl": ("text_config", "qwen2_5_vl_text"),
    "qwen3_vl": ("text_config", "qwen3_vl_text"),
    "qwen3_vl_moe": ("text_config", "qwen3_vl_moe_text"),
    "gemma3": ("text_config", "gemma3_text"),
    "llama4": ("text_config", "llama4_text"),
    "internvl_chat": ("llm_config", "internlm2"),
    "internvl": ("text_config", "qwen2"),
}
# Older checkpoints write the text sizes at the top level of these.
_FLAT_ALLOWED = {"qwen2_vl", "qwen2_5_vl"}
_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a config.json's contents.

    Raises:
        ShapeError: The family is not known here, or a size that its cache needs is absent.
    """
    top_type = _string(config, "model_type")
    text, text_type, has_vision = _text_part(config, top_type)
    family = _FAMILIES.get(text_type)
    if family is None:
        raise ShapeError(
            f"model_type {text_type!r}: how its layers cache is not known here; give --layers, --kv-heads and "
            f"--head-size by hand if every layer is plain full attention. Known: {', '.join(sorted(_FAMILIES))}"
        )
    sizes = {**dict(family.defaults), **{key: value for key, value in text.items() if value is not None}}
    groups = _groups(sizes, family, text_type)
    dtype = next((c.get(k) for c in (config, text) for k in ("dtype", "torch_dtype") if c.get(k)), None)
    return ModelShape(
        model_type=top_type,
        groups=groups,
        hidden_size=_optional(sizes, "hidden_size", "n_embd"),
        intermediate_size=_optional(sizes, "intermediate_size", "ffn_dim", "n_inner"),
        attention_heads=_optional(sizes, "num_attention_heads", "n_head"),
        vocab_size=_optional(sizes, "vocab_size") or _optional(config, "vocab_size"),
        max_position=_optional(sizes, "max_position_embeddings", "n_positions", "max_sequence_length"),
        dtype=_DTYPES.get(str(dtype).removeprefix("torch.")) if dtype else None,
        text_parameters=_count_parameters(sizes, groups, config) if family.dense else None,
        has_vision=has_vision,
        quantized=bool(config.get("quantization_config") or text.get("quantization_config")),
    )


def _text_part(config: Mapping[str, Any], model_type: str) -> tuple[Mapping[str, Any], str, bool]:
    if model_type not in _TEXT_PARTS:
        if model_type not in _FAMILIES and "text_config" in config:
            raise ShapeError(
                f"model_type {model_type!r} has a text_config, but how the model uses it is not known here. "
                f"Known with vision: {', '.join(sorted(_TEXT_PARTS))}"
            )
        return config, model_type, False
    key, default_type = _TEXT_PARTS[model_type]
    text = config.get(key)
    if text is None:
        if model_type not in _FLAT_ALLOWED:
            raise ShapeError(f"model_type {model_type!r} needs {key}, which the config lacks")
        return config, default_type, True
    if not isinstance(text, Mapping):
        raise ShapeError(f"{key} is {text!r}, allowed: an object")
    return text, str(text.get("model_type") or default_type), True


def _groups(sizes: Mapping[str, Any], family: _Family, text_type: str) -> tuple[LayerGroup, ...]:
    if family.pattern == "latent":
        return (_latent_group(sizes, text_type),)
    if family.pattern == "falcon":
        return (_falcon_group(sizes),)
    if family.pattern == "gpt2":
        heads = _size(sizes, "n_head")
        kv_heads = 1 if text_type == "gpt_bigcode" and sizes.get("multi_query", True) else heads
        head = _size(sizes, "n_embd") // heads
        return (LayerGroup(LayerKind.FULL, _size(sizes, "n_layer"), kv_heads, head, head),)
    layers = _size(sizes, "num_hidden_layers")
    heads = _size(sizes, "num_attention_heads")
    kv_heads = _optional(sizes, "num_key_value_heads") or heads
    head = _optional(sizes, "head_dim") or _head_size(sizes, heads)
    kinds = list(_kinds(sizes, family.pattern, layers))
    if len(kinds) != layers:
        raise ShapeError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    order = list(dict.fromkeys(kinds))
    return tuple(LayerGroup(kind, kinds.count((kind, window)), kv_heads, head, head, window) for kind, window in order)


def _kinds(sizes: Mapping[str, Any], pattern: str, layers: int) -> Iterable[tuple[LayerKind, int | None]]:
    """Kind and window of each layer, in order."""
    full: tuple[LayerKind, int | None] = (LayerKind.FULL, None)
    window = sizes.get("sliding_window") or None
    if pattern == "qwen_window" and not sizes.get("use_sliding_window", False):
        return [full] * layers
    if "layer_types" in sizes and pattern != "uniform_window":
        return [_named_kind(str(name), sizes) for name in sizes["layer_types"]]
    if pattern in ("full", "uniform_window"):
        return [full if window is None or pattern == "full" else (LayerKind.SLIDING, int(window))] * layers
    if pattern == "qwen_window":
        first = _size(sizes, "max_window_layers")
        sliding = (LayerKind.SLIDING, _size(sizes, "sliding_window"))
        return [sliding if index >= first else full for index in range(layers)]
    if pattern == "llama4":
        chunk = (LayerKind.CHUNKED, _size(sizes, "attention_chunk_size"))
        rope = sizes.get("no_rope_layers") or [
            int((index + 1) % _size(sizes, "no_rope_layer_interval") != 0) for index in range(layers)
        ]
        return [chunk if uses_rope else full for uses_rope in rope]
    every = _size(sizes, "sliding_window_pattern")
    sliding = (LayerKind.SLIDING, _size(sizes, "sliding_window"))
    return [full if (index + 1) % every == 0 else sliding for index in range(layers)]


def _named_kind(name: str, sizes: Mapping[str, Any]) -> tuple[LayerKind, int | None]:
    if name in ("full_attention", "attention"):
        return LayerKind.FULL, None
    if name == "sliding_attention":
        return LayerKind.SLIDING, _size(sizes, "sliding_window")
    if name == "chunked_attention":
        return LayerKind.CHUNKED, _size(sizes, "attention_chunk_size")
    raise ShapeError(f"layer_types has {name!r}, whose state is not a KV cache of a known size")


def _latent_group(sizes: Mapping[str, Any], text_type: str) -> LayerGroup:
    if sizes.get("kv_lora_rank") is None:
        raise ShapeError(f"model_type {text_type!r} needs kv_lora_rank, which the config lacks")
    latent = _size(sizes, "kv_lora_rank") + _size(sizes, "qk_rope_head_dim")
    return LayerGroup(LayerKind.LATENT, _size(sizes, "num_hidden_layers"), 1, latent, 0)


def _falcon_group(sizes: Mapping[str, Any]) -> LayerGroup:
    """Falcon: 7B is multi-query; the new decoder architecture groups; otherwise one KV head per head."""
    heads = _size(sizes, "num_attention_heads", "n_head")
    layers = _size(sizes, "num_hidden_layers", "n_layer")
    if sizes.get("new_decoder_architecture"):
        kv_heads = _size(sizes, "num_kv_heads", "n_head_kv")
    else:
        kv_heads = 1 if sizes.get("multi_query", True) else heads
    head = _size(sizes, "hidden_size") // heads
    return LayerGroup(LayerKind.FULL, layers, kv_heads, head, head)


def _count_parameters(
    sizes: Mapping[str, Any], groups: tuple[LayerGroup, ...], config: Mapping[str, Any]
) -> int | None:
    """Matrices of a plain gated decoder: embeddings, attention, MLP. Norms and biases (under 0.1 %) are left out."""
    hidden, inner = _optional(sizes, "hidden_size"), _optional(sizes, "intermediate_size")
    heads, vocab = _optional(sizes, "num_attention_heads"), _optional(sizes, "vocab_size")
    if hidden is None or inner is None or heads is None or vocab is None:
        return None
    tied = bool(sizes.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    total = vocab * hidden * (1 if tied else 2)
    for group in groups:
        attention = 2 * hidden * heads * group.key_size + hidden * group.kv_heads * (group.key_size + group.value_size)
        total += group.layers * (attention + 3 * hidden * inner)
    return total


def _head_size(sizes: Mapping[str, Any], heads: int) -> int:
    hidden = _size(sizes, "hidden_size")
    if hidden % heads:
        raise ShapeError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is absent")
    return hidden // heads


def _size(sizes: Mapping[str, Any], *names: str) -> int:
    value = _optional(sizes, *names)
    if value is None:
        raise ShapeError(f"the config lacks {' or '.join(names)}")
    return value


def _optional(sizes: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = sizes.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError(f"{name} is {value!r}, allowed: a whole number of 1 or more")
        return value
    return None


def _string(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise ShapeError(f"the config lacks {name}")
    return value
