"""What the trainers share: slices of a schedule that counts steps, saved often, stopped at any moment."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Protocol

SAVE_EVERY = 10
_LATEST_SHARE = 0.05  # of the newest step in the means that are shown
STOPPED = "stopped; the same command goes on from the last saved step"


class Stepping(Protocol):
    """A trainer: `step` is how many steps its state has seen."""

    step: int

    def save(self) -> None:
        """Write the state."""


def add_slice_options(parser: argparse.ArgumentParser, *, steps: int, seed: int) -> None:
    """The options that every trainer has."""
    parser.add_argument("--steps", type=int, default=steps, help="length of the whole schedule")
    parser.add_argument("--until", type=int, help="stop this slice after so many steps in all")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--threads", type=int, default=2)


def run_slice(trainer: Stepping, advance: Callable[[], dict[str, float]], options: argparse.Namespace) -> None:
    """Call `advance` for the steps that are left of the slice, and print the running means of the losses it returns."""
    means: dict[str, float] = {}
    first, began_s = trainer.step, time.monotonic()
    last = min(options.steps, options.until or options.steps)
    while trainer.step < last:
        for name, value in advance().items():
            means[name] = means.get(name, value) + _LATEST_SHARE * (value - means.get(name, value))
        if trainer.step % SAVE_EVERY == 0 or trainer.step == last:
            trainer.save()
            each_s = (time.monotonic() - began_s) / (trainer.step - first)
            shown = " ".join(f"{name} {value:.3f}" for name, value in sorted(means.items()))
            print(f"step {trainer.step}/{options.steps} {shown} {each_s:.1f} s a step", flush=True)
