# SPDX-License-Identifier: Apache-2.0
"""The GPT trainer, which in its first and last step waits for the tiers; `launch.SCRIPTS` has it.

How much is written before its use depends on how busy the machine is. In these two steps all of it
is: each forward pass ends when its writes have, and the step when nothing is left on the tiers, or
in the end with what would stay there. The steps between them are as ever.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))

from megatron.offload.activations.engine import OffloadEngine  # noqa: E402
from megatron.offload.activations.saved.save_order import SaveOrder  # noqa: E402
from megatron.offload.activations.saved.scope import Scope  # noqa: E402
from megatron.offload.activations.stats.traffic import Traffic  # noqa: E402
from megatron.offload.stats.statistics import StepStatistics  # noqa: E402
from tests.support.waiting import SOON_S  # noqa: E402


def connect(num_steps: int) -> None:
    """Changes the engine of this process."""
    step, forward, end_step = OffloadEngine.step, OffloadEngine.forward, Traffic.end_step
    number = 0

    @contextlib.contextmanager
    def counted_step(self: OffloadEngine) -> Iterator[None]:
        nonlocal number
        number += 1
        with step(self):
            yield

    @contextlib.contextmanager
    def settled_forward(self: OffloadEngine, scope: Scope) -> Iterator[SaveOrder]:
        with forward(self, scope) as save_order:
            yield save_order
        if number in (1, num_steps):
            assert self.wait_for_writes(SOON_S), "writes did not end"

    def settled_end(self: Traffic, statistics: StepStatistics) -> None:
        deadline = time.monotonic() + SOON_S
        while number in (1, num_steps) and time.monotonic() < deadline:
            if not any(tier.used_bytes for tier in self._tiers.values()):
                break
            time.sleep(0.001)
        end_step(self, statistics)

    OffloadEngine.step = counted_step  # type: ignore[method-assign]
    OffloadEngine.forward = settled_forward  # type: ignore[method-assign]
    Traffic.end_step = settled_end  # type: ignore[method-assign]


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer.gpt import GPT

    return GPT()


if __name__ == "__main__":
    from trainer.start import start

    connect(int(sys.argv[sys.argv.index("--train-iters") + 1]))
    sys.exit(start(make_task))
