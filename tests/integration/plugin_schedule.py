"""The scheduler plugin around vLLM's own Scheduler and AsyncScheduler, without a model; for the server's environment.

python plugin_schedule.py FOLDER < scenarios.json    vllm_schedule.py's scenarios; scenario n records to FOLDER/n
python plugin_schedule.py FOLDER --cost              what the plugin adds to a step, as JSON
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import vllm_schedule
from framechat_scheduler import CONTROL_SOCKET, STEPS_FOLDER, recording
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.outputs import ModelRunnerOutput

PLAIN = {"Scheduler": vllm_schedule.Scheduler, "AsyncScheduler": vllm_schedule.AsyncScheduler}
MADE = []
ROUNDS, STEPS = 4, 200


def use_plugin(folder: Path) -> None:
    """The driver makes recording schedulers from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[STEPS_FOLDER] = str(folder / "steps")
    os.environ[CONTROL_SOCKET] = str(folder / "scheduler.sock")
    for name, plain in PLAIN.items():
        kind = recording(plain)

        def make(_kind=kind, **arguments):
            MADE.append(_kind(**arguments))
            return MADE[-1]

        setattr(vllm_schedule, name, make)


def record(folder: Path) -> list:
    answers = []
    with tempfile.TemporaryDirectory() as model:
        for number, scenario in enumerate(json.load(sys.stdin)):
            use_plugin(folder / str(number))
            answers.append(vllm_schedule.run(scenario, Path(model)))
            MADE[-1].shutdown()
    return answers


def step_us(scheduler, requests: int) -> list[tuple[float, float]]:
    """Of each step, while `requests` decode: wall and processor time spent in schedule and update_from_output."""
    for number in range(requests):
        item = {"prefix": 0, "prefix_tokens": 0, "prompt": 16, "images": [], "output": STEPS + 50, "priority": 0}
        scheduler.add_request(vllm_schedule.make_request(number, {**item, "arrival_s": 0.0}, 16))
    taken = []
    for _ in range(STEPS):
        begin = now_us()
        output = scheduler.schedule()
        middle = now_us()
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
        )
        again = now_us()
        scheduler.update_from_output(output, answer)
        end = now_us()
        taken.append(tuple(b - a + d - c for a, b, c, d in zip(begin, middle, again, end, strict=True)))
        time.sleep(0.0005)  # the model's turn; the writer has it too
    return taken[STEPS // 10 :]


def now_us() -> tuple[float, float]:
    return time.perf_counter_ns() / 1000, time.thread_time_ns() / 1000


def cost(folder: Path) -> dict:
    rules = {
        "budget": 2048, "max_num_seqs": 256, "threshold": 0, "adaptive": False, "chunked": True, "by_priority": False,
        "watermark": 0.0, "reserve_prompt": True, "whole_items": False, "prefix_caching": True, "block_tokens": 16,
        "blocks": 8000, "encoder_budget": 64, "encoder_cache": 64, "max_model_len": 512, "asynchronous": False,
    }  # fmt: skip
    found = {}
    with tempfile.TemporaryDirectory() as model:
        for requests in (1, 8, 64, 256):
            taken = {"without": [], "with": []}
            for number in range(ROUNDS):
                for name in taken:
                    if name == "with":
                        use_plugin(folder / f"{requests}-{number}")
                    else:
                        vllm_schedule.Scheduler = PLAIN["Scheduler"]
                    scheduler = vllm_schedule.make_scheduler(rules, Path(model))
                    taken[name] += step_us(scheduler, requests)
                    scheduler.shutdown()
            found[requests] = {
                name: [round(statistics.median(samples), 1) for samples in zip(*rows, strict=True)]
                for name, rows in taken.items()
            }
    return found


def main() -> None:
    init_none_hash(sha256)
    folder = Path(sys.argv[1])
    answer = cost(folder) if "--cost" in sys.argv else record(folder)
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
