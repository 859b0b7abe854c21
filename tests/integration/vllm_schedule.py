"""Drive vLLM's own Scheduler without a model: a scenario in as JSON on stdin, every step's decisions out as JSON.

Runs in the server's environment (`.venv-vllm`). Tokens come from a counter instead of a model, time from a count of
steps: step n starts at time n, so that an arrival at 3.0 is seen by the fourth step.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 65536,
    "torch_dtype": "float16",
}


def make_scheduler(rules: dict, folder: Path) -> Scheduler:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=rules["max_model_len"]
    )
    scheduling = SchedulerConfig(
        max_num_seqs=rules["max_num_seqs"],
        max_num_batched_tokens=rules["budget"],
        long_prefill_token_threshold=rules["threshold"],
        long_prefill_token_threshold_adaptive=rules["adaptive"],
        enable_chunked_prefill=rules["chunked"],
        policy="priority" if rules["by_priority"] else "fcfs",
        watermark=rules["watermark"],
        scheduler_reserve_full_isl=rules["reserve_prompt"],
        disable_chunked_mm_input=rules["whole_items"],
        max_model_len=rules["max_model_len"],
        is_encoder_decoder=False,
        async_scheduling=rules["asynchronous"],
    )
    cache = CacheConfig(block_size=rules["block_tokens"], enable_prefix_caching=rules["prefix_caching"])
    config = VllmConfig(
        scheduler_config=scheduling, model_config=model, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    spec = FullAttentionSpec(block_size=rules["block_tokens"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache.num_gpu_blocks = rules["blocks"]
    groups = KVCacheConfig(
        num_blocks=rules["blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    scheduler = (AsyncScheduler if rules["asynchronous"] else Scheduler)(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=rules["block_tokens"],
        log_stats=False,
    )
    scheduler.max_num_encoder_input_tokens = rules["encoder_budget"]
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=rules["encoder_cache"])
    return scheduler


def make_request(number: int, item: dict, block_tokens: int) -> Request:
    """Prompt tokens: the same within a shared prefix, otherwise the request's own."""
    shared = item["prefix_tokens"]
    tokens = [(7 * place + item["prefix"]) % 499 for place in range(shared)]
    tokens += [500 + (number + 13 * place) % 499 for place in range(shared, item["prompt"])]
    if item["prompt"] > shared:
        tokens[shared] = 1_000_000 + number  # makes every later block the request's own
    images = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image-{image['content']}",
            mm_position=PlaceholderRange(offset=image["offset"], length=image["tokens"]),
        )
        for image in item["images"]
    ]
    return Request(
        request_id=f"{number:06d}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=item["output"], ignore_eos=True),
        pooling_params=None,
        mm_features=images,
        priority=item["priority"],
        arrival_time=item["arrival_s"],
        block_hasher=get_request_block_hasher(block_tokens, sha256),
    )


def run(scenario: dict, folder: Path) -> dict:
    rules, requests = scenario["rules"], scenario["requests"]
    scheduler = make_scheduler(rules, folder)
    depth = 2 if rules["asynchronous"] else 1
    steps: list = []
    flight: list = []  # steps in flight, oldest first: (what was scheduled, what the model will answer, its end)
    arrived, token, now, busy_until = 0, 2_000_000, 0.0, 0.0
    while len(steps) < scenario["max_steps"]:
        while arrived < len(requests) and requests[arrived]["arrival_s"] <= now:
            scheduler.add_request(make_request(arrived, requests[arrived], rules["block_tokens"]))
            arrived += 1
        output = scheduler.schedule() if scheduler.has_requests() else None
        if output is not None and output.num_scheduled_tokens:
            sampled = []
            for name in output.num_scheduled_tokens:
                token += 1
                sampled.append([] if scheduler.requests[name].is_prefill_chunk else [token])
            steps.append(
                {
                    "tokens": [[int(name), count] for name, count in output.num_scheduled_tokens.items()],
                    "images": sorted([int(name), len(ids)] for name, ids in output.scheduled_encoder_inputs.items()),
                    "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                    "running": len(scheduler.running),
                    "waiting": len(scheduler.waiting),
                }
            )
            names = list(output.num_scheduled_tokens)
            answer = ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
            )
            busy_until = max(now, busy_until) + 1.0
            flight.append((output, answer, busy_until))
            if len(flight) < depth and flight[0][2] > now:
                continue
        elif not flight:
            if arrived == len(requests):
                break
            now = max(now, requests[arrived]["arrival_s"])
            continue
        output, answer, end = flight.pop(0)
        now = max(now, end)
        scheduler.update_from_output(output, answer)
    return {"steps": steps, "hangs": not flight and scheduler.has_unfinished_requests()}


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scenarios = json.load(sys.stdin)
        answers = [run(scenario, Path(folder)) for scenario in scenarios]
    sys.stdout.write("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
