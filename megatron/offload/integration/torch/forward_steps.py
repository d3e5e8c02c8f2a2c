# SPDX-License-Identifier: Apache-2.0
"""The steps of a training loop, as the calls of its model show them: `ForwardSteps`.

It finds steps without the engine, so that a run without offload is measured in the same way. The
handle of activations puts it on the model where there is a metrics file; nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.offload.device.clock import Moment
from megatron.offload.device.cuda import is_captured
from megatron.offload.integration.torch.passes import computed_in
from megatron.offload.integration.torch.step_log import StepLog
from megatron.offload.integration.torch.surroundings import can_hook, is_recorded
from megatron.offload.stats.memory import PeakMemory


class ForwardSteps:
    """Tells a log of steps. A step is a forward pass and what follows until the next one.

    Args:
        log: of the steps.
        statistics: of the step, from the engine; empty without offload.
    """

    def __init__(self, log: StepLog, statistics: Callable[[], Mapping[str, int | float]]) -> None:
        self._log = log
        self._statistics = statistics
        self._sees = True  # False: a trainer tells the log where steps begin and end
        self._counts_tokens = True
        self._memory: PeakMemory | None = None
        self._depth = 0  # of calls of hooked modules within each other
        self._number = 0  # of the step under way, from 1
        self._ended: Moment = None  # its passes
        self._peak_bytes: int | None = None

    def hand_over(self, *, counts_tokens: bool) -> StepLog:
        """The log, which the caller tells from now on where steps begin and end.

        Args:
            counts_tokens: tokens of the model's calls are still counted.
        """
        self._sees, self._counts_tokens = False, counts_tokens
        return self._log

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hooked module is called: if it is a training's forward pass, a step begins."""
        self._depth += 1
        if self._depth > 1 or not _is_training():
            return
        if self._sees:
            self._begin_step(module)
        if self._counts_tokens:
            self._log.add_tokens((args, kwargs))

    def end(self, module: torch.nn.Module, result: Any) -> None:
        """The call of a hooked module has ended."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or not self._number or not _is_training():
            return
        self._log.add_loss(_loss_of(result))
        for one in computed_in(result):
            one.register_hook(self._begin_backward)

    def close(self) -> None:
        """Ends the last step where its passes ended, and closes the log."""
        self._end_step(self._ended)
        self._log.close()

    def _begin_step(self, module: torch.nn.Module) -> None:
        self._end_step(None)
        device = self._log.begin(next(module.parameters(), torch.empty(0)).device)
        if self._memory is None:
            self._memory = PeakMemory(device)
        self._number += 1
        self._memory.begin_step()
        self._peak_bytes = None
        self._ended = self._log.now()

    # Else torch warns where a script saves an output.
    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
    def _begin_backward(self, _: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._memory is not None:
            self._peak_bytes = max(self._memory.end_step(), self._peak_bytes or 0)
        self._ended = self._log.now()

    def _end_step(self, ended: Moment) -> None:
        if self._memory is None:  # no step has begun
            return
        peak_bytes = self._memory.end_step() if self._peak_bytes is None else self._peak_bytes
        device_bytes = self._memory.device_bytes()
        self._log.add_peaks(
            {"peak_activation_bytes": peak_bytes, "peak_device_bytes": device_bytes}
        )
        self._log.add(self._statistics())
        self._log.end(self._number, ended)


def _is_training() -> bool:
    """Whether this is the forward pass of a step; while a graph is captured none runs."""
    return torch.is_grad_enabled() and can_hook() and not is_captured() and not is_recorded()


def _loss_of(result: Any) -> Any:
    """The loss that a model returns, if it is one of those that do."""
    if isinstance(result, Mapping):
        return result.get("loss")
    if isinstance(result, torch.Tensor):
        return result
    first = result[0] if isinstance(result, tuple | list) and result else None
    return getattr(result, "loss", first)
