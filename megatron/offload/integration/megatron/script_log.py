# SPDX-License-Identifier: Apache-2.0
"""What the launcher adds to a training script's own log: `describe` and `write_scalars`.

`training_script.py` calls them where Megatron-LM logs a step.
"""

from __future__ import annotations

from megatron.offload.integration.megatron.patch_point import PatchPoint
from megatron.offload.sizes import format_size

_GLOBALS = "megatron.training.global_vars"
GET_FLAGS = PatchPoint(_GLOBALS, "get_args", ())
GET_TENSORBOARD = PatchPoint(_GLOBALS, "get_tensorboard_writer", ())
GET_WANDB = PatchPoint(_GLOBALS, "get_wandb_writer", ())


def describe(metrics: dict[str, float]) -> str:
    """What is added to Megatron-LM's line, in its manner."""
    parts = []
    if "offloaded_bytes" in metrics:
        parts += [
            f" offloaded: {format_size(metrics['offloaded_bytes'])} |",
            f" rejected: {format_size(metrics['rejected_bytes'])} |",
            f" stall: {metrics['stall_s'] + metrics['write_wait_s']:.3f} s |",
        ]
    if metrics.get("predicted_step_s"):
        parts += [
            f" step: {metrics['measured_step_s']:.3f} s"
            f" (predicted {metrics['predicted_step_s']:.3f} s) |",
            f" planned peak: {format_size(metrics['predicted_peak_bytes'])} |",
        ]
    if "peak_activation_bytes" in metrics:
        parts += [f" peak activations: {format_size(metrics['peak_activation_bytes'])} |"]
    return "".join(parts)


def write_scalars(metrics: dict[str, float], iteration: int) -> None:
    """To TensorBoard and wandb, where this rank writes there, under `offload/`."""
    tensorboard, wandb = GET_TENSORBOARD.find()(), GET_WANDB.find()()
    flags = GET_FLAGS.find()()
    if not metrics or iteration % flags.tensorboard_log_interval != 0:
        return
    scalars = {f"offload/{name}": value for name, value in metrics.items()}
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
