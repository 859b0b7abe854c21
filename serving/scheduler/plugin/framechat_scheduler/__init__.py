"""FrameChat's part of the engine: vLLM's own scheduler, which also writes down every step and takes a step budget.

Runs in the server's environment, where nothing of the app is installed: only the standard library and vLLM are
imported. vLLM is given `--scheduler-cls framechat_scheduler.make_scheduler` and, in the environment,

    FRAMECHAT_STEPS_FOLDER      where the step files go
    FRAMECHAT_CONTROL_SOCKET    path of the control channel

Every decision stays vLLM's. Where something here does not fit the running vLLM, its own scheduler runs alone and the
log says so. Written for the scheduler interface of release 0.32, which vLLM declares to be private.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from .channel import ControlChannel
from .recorder import StepRecorder
from .stepfile import StepWriter

STEPS_FOLDER = "FRAMECHAT_STEPS_FOLDER"
CONTROL_SOCKET = "FRAMECHAT_CONTROL_SOCKET"
_USED = ("schedule", "update_from_output", "get_request_counts", "get_kv_cache_usage", "shutdown")
_log = logging.getLogger("vllm.framechat_scheduler")


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """What vLLM calls in place of a scheduler class; the scheduler that it would have made, with our part added."""
    base = own_choice(vllm_config)
    problem = _misfit(vllm_config, base)
    if problem is None:
        try:
            return recording(base)(vllm_config=vllm_config, **arguments)
        except OSError as error:
            problem = str(error)
    _log.warning("the scheduler plugin stays off, so that steps are not recorded: %s", problem)
    return base(vllm_config=vllm_config, **arguments)


def own_choice(vllm_config: Any) -> type:
    """The class that vLLM takes when it is told none."""
    if vllm_config.diffusion_config is not None:
        from vllm.v1.core.sched import diffusion_scheduler  # noqa: PLC0415 - there is no vLLM in the app's environment

        overlapped = vllm_config.scheduler_config.async_scheduling
        name = "DiffusionAsyncScheduler" if overlapped else "DiffusionScheduler"
        chosen: type = getattr(diffusion_scheduler, name)
        return chosen
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415

        overlapping: type = AsyncScheduler
        return overlapping
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    plain: type = Scheduler
    return plain


def _misfit(vllm_config: Any, base: type) -> str | None:
    missing = [name for name in _USED if not hasattr(base, name)]
    if missing:
        return f"this vLLM's scheduler has no {', '.join(missing)}"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "there are several engines (data parallel), and one step file"
    unset = [name for name in (STEPS_FOLDER, CONTROL_SOCKET) if not os.environ.get(name)]
    return f"{' and '.join(unset)} not set" if unset else None


def recording(base: type) -> type:
    """A subclass of vLLM's scheduler class `base` that records its steps and takes its budget from the channel."""

    class RecordingScheduler(base):  # type: ignore[misc]
        """vLLM's scheduler; a step is timed from the entry of `schedule` to the end of `update_from_output`."""

        max_num_scheduled_tokens: int

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._framechat_writer = writer = StepWriter(Path(os.environ[STEPS_FOLDER]))
            self._framechat_recorder: StepRecorder | None = StepRecorder(writer.put)
            try:
                self._framechat_channel = ControlChannel(
                    Path(os.environ[CONTROL_SOCKET]),
                    configured=self.max_num_scheduled_tokens,
                    least=self._framechat_least_budget(),
                    most=self.scheduler_config.max_num_batched_tokens,
                    figures=lambda: {
                        "asynchronous": bool(self.scheduler_config.async_scheduling),
                        "steps": writer.written,
                        "dropped": writer.dropped,
                    },
                )
            except BaseException:
                writer.close()
                raise

        def _framechat_least_budget(self) -> int:
            """Below this some prompts could never be scheduled, and everybody behind them would wait for ever."""
            scheduling = self.scheduler_config
            if not scheduling.enable_chunked_prefill or scheduling.disable_chunked_mm_input:
                return int(self.max_num_scheduled_tokens)
            return int(self.block_size) if self.need_mamba_block_aligned_split else 1

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            start_s = time.monotonic()
            self.max_num_scheduled_tokens = budget = self._framechat_channel.budget
            output = super().schedule(*args, **kwargs)
            if self._framechat_recorder is not None:
                try:
                    self._framechat_recorder.scheduled(
                        output, self.requests, start_s, budget, self.get_request_counts(), self.get_kv_cache_usage()
                    )
                except Exception:
                    self._framechat_give_up()
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)
            if self._framechat_recorder is not None:
                try:
                    self._framechat_recorder.completed(scheduler_output, outputs, time.monotonic())
                except Exception:
                    self._framechat_give_up()
            return outputs

        def shutdown(self) -> None:
            self._framechat_channel.close()
            self._framechat_writer.close()
            super().shutdown()

        def _framechat_give_up(self) -> None:
            """Serving goes on whatever happens here."""
            self._framechat_recorder = None
            _log.exception("steps are no longer recorded")

    RecordingScheduler.__qualname__ = f"Recording{base.__name__}"
    return RecordingScheduler
