# SPDX-License-Identifier: Apache-2.0
"""The trainer's flags that move a tiny model's activations: `ssd`, `auto`, `flags_of`."""

from __future__ import annotations

from pathlib import Path


def ssd(directory: Path) -> str:
    """Flags that put every activation of more than a kilobyte on the disk."""
    return (
        f"--activation-offload ssd --activation-offload-dir {directory}"
        " --activation-offload-min-bytes 1KiB"
    )


def auto(directory: Path, *more: str) -> str:
    """Flags that plan for as little memory as possible, however long a step then takes."""
    return " ".join(
        (
            f"--activation-offload auto --activation-offload-dir {directory}",
            "--activation-offload-min-bytes 1KiB",
            *more,
        )
    )


def flags_of(placement: str, directory: Path, num_layers: int) -> str:
    """Flags that place every activation of more than a kilobyte.

    Args:
        placement: recompute, ssd, host, tiered, or mixed: all of them, each in a layer of its own.
            inputs: all layers are recomputed, from inputs on the SSD. full: the same by Megatron.
        directory: on the SSD.
        num_layers: of the model, at least 2.
    """
    mode = "tiered" if placement == "mixed" else placement
    if placement in ("recompute", "inputs", "full"):
        mode = "ssd"
    flags = f"--activation-offload {mode} --activation-offload-min-bytes 1KiB"
    if mode != "host":
        flags += f" --activation-offload-dir {directory}"
    if mode != "ssd":
        flags += " --activation-offload-host-budget " + ("1GiB" if mode == "host" else "256KiB")
    if placement in ("recompute", "inputs"):
        flags += f" --activation-recompute-layers 1-{num_layers}"
    if placement == "inputs":
        flags += " --activation-recompute-input ssd"
    elif placement == "full":
        flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif placement == "mixed":  # kept in the last layer
        flags += " --activation-recompute-layers 1 --activation-offload-layers 2"
        if num_layers > 2:
            flags += ",3"
    return flags
