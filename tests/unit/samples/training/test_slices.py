from __future__ import annotations

import argparse

import pytest

from samples.training.slices import add_slice_options, run_slice


class Counting:
    """Its loss is the number of the step."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.saved = step, list[int]()

    def save(self) -> None:
        self.saved.append(self.step)

    def advance(self) -> dict[str, float]:
        self.step += 1
        return {"loss": float(self.step)}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_slice_options(parser, steps=100, seed=1)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("start", "words", "saved"),
    [
        (0, ("--until", "25"), [10, 20, 25]),
        (25, ("--until", "40"), [30, 40]),
        (0, ("--steps", "7", "--until", "40"), [7]),
        (40, ("--until", "40"), []),
    ],
)
def test_a_slice_goes_on_where_the_last_one_stopped_and_is_saved_often(
    start: int, words: tuple[str, ...], saved: list[int]
) -> None:
    trainer = Counting(start)
    run_slice(trainer, trainer.advance, options(*words))
    assert trainer.saved == saved


def test_running_means_lean_on_the_latest_steps(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Counting()
    run_slice(trainer, trainer.advance, options("--until", "2"))
    assert "step 2/100 loss 1.050 " in capsys.readouterr().out
