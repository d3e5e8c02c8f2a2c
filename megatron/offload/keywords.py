# SPDX-License-Identifier: Apache-2.0
"""Types of the keywords that the doors for PyTorch take, for editors and type checkers.

Generated from the fields of `OffloadConfig`, `StatesConfig` and `ParametersConfig` by
`tools/write_flags.py`; do not edit. What each means: docs/flags.md, where each has its line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, TypedDict

_Path = str | os.PathLike[str]

ActivationMode = Literal["off", "keep", "ssd", "host", "tiered", "auto"]


class ActivationSettings(TypedDict, total=False):
    """Of `OffloadConfig`, all but `mode`; sizes as numbers or text."""

    directories: _Path | Iterable[_Path]
    host_budget: int | float | str | None
    ssd_budget_bytes: int | str | None
    threads: int | str | None
    io: Literal["auto", "direct", "buffered", "gds"]
    write_bytes_per_s: float | str | None
    offload_layers: str | int | None
    recompute_layers: str | int | None
    recompute_input: Literal["keep", "host", "ssd", "tiered"] | None
    boundary: Literal["keep", "host", "ssd", "tiered"]
    memory_budget_bytes: int | str | None
    max_slowdown: float | str | None
    plan_file: _Path | None
    min_bytes: int | str
    granularity: Literal["layer", "part", "operation"]
    inflight_bytes: int | str | None
    pinned_bytes: int | str | None
    trace_file: _Path | None
    memory_report_file: _Path | None
    replay: Literal["off", "on"] | bool | None
    codec: Literal["off", "int8", "int4"]
    chunked_loss: Literal["off", "auto"] | int
    tiled_mlp: Literal["off", "auto"] | int
    verify: Literal["off", "checksum"]
    drive_endurance_bytes: int | str | None


OptimizerStateMode = Literal["off", "host", "ssd", "tiered", "auto"]


class OptimizerStateSettings(TypedDict, total=False):
    """Of `StatesConfig`, all but `mode`; sizes as numbers or text."""

    directories: _Path | Iterable[_Path]
    host_budget: int | float | str | None
    ssd_budget_bytes: int | str | None
    threads: int | str | None
    io: Literal["auto", "direct", "buffered"]
    write_bytes_per_s: float | str | None
    step_on: Literal["device", "cpu"]
    window_bytes: int | str
    bucket_bytes: int | str
    drive_endurance_bytes: int | str | None
    device_memory_budget_bytes: int | str | None


ParameterMode = Literal["off", "host", "ssd", "tiered"]


class ParameterSettings(TypedDict, total=False):
    """Of `ParametersConfig`, all but `mode`; sizes as numbers or text."""

    directories: _Path | Iterable[_Path]
    host_budget: int | float | str | None
    ssd_budget_bytes: int | str | None
    threads: int | str | None
    io: Literal["auto", "direct", "buffered"]
    write_bytes_per_s: float | str | None
    gradients: Literal["off", "on"] | bool
    codec: Literal["off", "int8", "nf4"]
    live_units: int | str
