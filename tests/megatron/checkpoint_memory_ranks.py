# SPDX-License-Identifier: Apache-2.0
"""The example trainer for GPT, which prints by how many MiB the memory of a rank grows while it
saves and loads; test_model_state_checkpoints.py starts it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from trainer.start import start


def anonymous_bytes() -> int:
    """Memory that is no file's, and so nobody's to take back."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what it needed at most printed."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        before, ended = anonymous_bytes(), threading.Event()
        most = [before]

        def watch() -> None:
            while not ended.wait(0.002):
                most.append(max(most.pop(), anonymous_bytes()))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            return function(*args)
        finally:
            ended.set()
            watching.join()
            if os.environ["RANK"] == "0":
                print(f"{function.__name__} {(most[0] - before) >> 20} MiB", flush=True)

    return call


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer import checkpointing
    from trainer.gpt import GPT

    for name in ("save_checkpoint", "load_checkpoint"):
        setattr(checkpointing, name, measured(getattr(checkpointing, name)))
    return GPT()


if __name__ == "__main__":
    sys.exit(start(make_task))
