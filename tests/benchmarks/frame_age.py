"""How old the pictures of a live RTSP camera on loopback are when they are handed out.

    python -m tests.benchmarks.frame_age [--seconds 30] [--fps 25] [--busy]

Two ages: from the reader's arrival (what the status shows), and from the moment the server drew the picture (the truth,
with encoding, network and decoding inside). With --busy the consumer takes 5 a second, as the detector does.
"""

from __future__ import annotations

import argparse
import json
import time

from pipeline.config import CameraConfig, SourceConfig
from pipeline.source import open_source
from serving.records import now_s
from tests.rtsp import age_ms, rtsp_camera


def figures(ages: list[float]) -> dict[str, float]:
    """Percentiles, milliseconds."""
    ages = sorted(ages)
    return {name: round(ages[min(len(ages) - 1, int(share * len(ages)))], 1) for name, share in
            (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--fps", type=int, default=25)
    parser.add_argument("--busy", action="store_true")
    arguments = parser.parse_args()
    drawn, arrived, index = [], [], -1
    with (
        rtsp_camera(fps=arguments.fps) as (address, _),
        open_source(CameraConfig(name="camera", source=address), SourceConfig()) as reader,
    ):
        if reader.wait_frame(-1, 60) is None:
            raise SystemExit(f"no picture: {reader.status()}")
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            frame = reader.wait_frame(index, 2.0)
            if frame is not None:
                index = frame.index
                arrived.append((now_s() - frame.arrived_s) * 1000)
                drawn.append(age_ms(frame))
                if arguments.busy:
                    time.sleep(0.2)
        status = reader.status()
    print(json.dumps({
        "frames": len(drawn), "fps": round(status.fps or 0, 1), "dropped": status.dropped,
        "since_arrival_ms": figures(arrived), "since_drawn_ms": figures(drawn),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
