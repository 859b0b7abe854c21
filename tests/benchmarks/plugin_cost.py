"""What the scheduler plugin adds to a step of the engine.

    python -m tests.benchmarks.plugin_cost

vLLM's own Scheduler is driven without a model, in turn with and without the plugin, while 1, 8, 64 and 256 requests
decode. Printed is the median time that a step spends in `schedule` and `update_from_output`, which is all that the
engine's thread ever gives to the plugin; the writer's thread works beside it, and shows in wall time where it had to be
waited for. On a busy machine only processor time tells something. A step of the sample model takes 30 ms.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from serving.command import server_python
from serving.config import ServerConfig
from serving.scheduler.wiring import Wiring

DRIVER = Path(__file__).parents[1] / "integration" / "plugin_schedule.py"


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(server_python(ServerConfig())), "-P", str(DRIVER), folder, "--cost"],
            env={"PATH": os.environ["PATH"], **Wiring(Path(folder)).environment({})},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"the driver failed: {done.stderr.strip().splitlines()[-1]}")
    print("a step, median us             without            with          plugin")
    for requests, figures in json.loads(done.stdout.splitlines()[-1]).items():
        for place, kind in enumerate(("wall", "processor")):
            without, with_it = figures["without"][place], figures["with"][place]
            print(f"{requests:>4} requests, {kind:<9} {without:13.1f}   {with_it:13.1f}   {with_it - without:+13.1f}")


if __name__ == "__main__":
    main()
