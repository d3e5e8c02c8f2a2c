# SPDX-License-Identifier: Apache-2.0
"""Which jobs each part of gpu_day.py has, and the most seconds of each: `PARTS`, `jobs`.

What is wanted most comes first in a part: what has not begun when the time is up is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from check.gpu.settings import SECTIONS
from check.gpu_day.bits import DOORS
from check.gpu_day.job import Job
from check.gpu_day.settings import Settings, Shape
from check.gpu_day.ways import AGAIN, COMPILED

_TINY_SECTIONS = ("two_gpus", "parameters")  # in a dry run; gpu_check's own test runs all
_STACK_WAYS = {  # and the steps that are measured
    "none": 8,
    "checkpointing": 8,
    "compiled": 8,
    "compiled_checkpointing": 8,
    "compiled_host": 8,
    "host": 8,
    "recompute_host": 8,
    "half": 8,
    "keep": 8,
    "replay": 8,
    "host_replay": 8,
    "replay_int8": 8,
    "replay_int4": 8,
    "host_int8": 8,
    "host_int4": 8,
    "trl": 6,
    "save_on_cpu_pinned": 5,
    "save_on_cpu": 3,
    "fsdp2_cpu": 4,
    "tiered": 4,
    "ssd": 3,
}
_LENGTHS = (4096, 8192)
_BUDGETS = (0.25, 0.5, 0.8)  # of what all layers save
_FULL = (  # way, where the states are
    ("checkpointing", "host"),
    ("recompute_host", "host"),
    ("checkpointing", "device"),
    ("fsdp2_cpu_checkpointing", "device"),
    ("checkpointing", "cpu"),
)
_LORA = (  # way, where the frozen layers are
    ("checkpointing", "device"),
    ("checkpointing", "host"),
    ("checkpointing", "host int8"),
    ("checkpointing", "host nf4"),
    ("recompute_host", "host nf4"),
)
_ROK_WAYS = ("none", "checkpointing", "replay", "host_replay", "host", "recompute_host", "half")
_ROK_BATCHES = (1, 4)  # the part stack has the one between
_LONG_WAYS = ("none", "checkpointing", *AGAIN)
_LONG = (32768, 65536)  # tokens, in one sequence
_SECONDS = 20.0  # of measured steps
_LIMIT_S = 75.0
_SLOW_WAYS, _SLOW_LIMIT_S = ("save_on_cpu", "tiered", "ssd"), 180.0
_DRY_LIMITS = 4  # times those: a dry run has a core or less
_HERE = "check.gpu_day"


def _facts(settings: Settings) -> list[Job]:
    return [
        Job("facts/host memory", f"{_HERE}.machine:grow_memory", 90),
        Job("facts/machine", f"{_HERE}.machine:facts", 60),
        Job("facts/copies", f"{_HERE}.link:copies", 90),
        Job("facts/page-locking", f"{_HERE}.link:page_locking", 90),
        Job("facts/calls", f"{_HERE}.launches:calls", 60),
        Job("facts/codecs", f"{_HERE}.commands:codec_rates", 90),
        Job("facts/drive", f"{_HERE}.drive:rates", 90),
        Job("facts/Python a storage", f"{_HERE}.commands:launch_bench", 150),
    ]


def _bits(settings: Settings) -> list[Job]:
    doors = [
        Job(
            f"bits/{door}",
            f"{_HERE}.bits:compare",
            150 if "compile" in door else 75,
            {"door": door},
        )
        for door in DOORS
    ]
    sections = [
        Job(f"bits/gpu_check {name}", f"{_HERE}.commands:gpu_check", 200, {"section": name})
        for name in SECTIONS
        if not settings.is_tiny or name in _TINY_SECTIONS
    ]
    tests = Job("bits/tests of the device layer", f"{_HERE}.commands:device_tests", 150)
    return [replace(job, is_timed=False) for job in (tests, *sections, *doors)]


def _stack(settings: Settings) -> list[Job]:
    jobs = []
    for seq in _LENGTHS:
        shape = settings.shape("stack", seq=seq)
        for way, steps in _STACK_WAYS.items():
            if settings.is_tiny and seq != _LENGTHS[0] and way != "host":
                continue  # a dry run shows nothing by it
            limit_s = _SLOW_LIMIT_S if way in (*_SLOW_WAYS, *COMPILED) else _LIMIT_S
            name = f"stack/{seq} {way}"
            jobs.append(_training(name, settings, shape, way, steps, limit_s=limit_s))
    return jobs


def _auto(settings: Settings) -> list[Job]:
    jobs = [Job("auto/compile", f"{_HERE}.commands:compile_planner", 120)]
    shape = settings.shape("stack")
    for share in _BUDGETS[: settings.few(len(_BUDGETS), 1)]:
        # On a CPU a budget is of the resident set, in which a tiny model is nothing.
        budget = settings.few(shape.budget(share), 64 << 20)
        jobs += [
            _training(
                f"auto/{share:.0%} of what layers save{words}", settings, shape, way, 8,
                limit_s=_SLOW_LIMIT_S if way in COMPILED else 120, budget_bytes=budget,
            )
            for way, words in {
                "auto": "", "auto_replay": ", with replay", "auto_int8": ", with int8",
                "compiled_auto": ", inside of compiled graphs",
            }.items()
        ]  # fmt: skip
    smallest = settings.few(shape.budget(_BUDGETS[0]), 64 << 20)
    jobs += [
        _training(
            f"auto/{_BUDGETS[0]:.0%} and no more memory{words}", settings, shape, way, 8,
            limit_s=120, budget_bytes=smallest, limits_memory=True,
        )
        for way, words in {"auto": "", "auto_replay": ", with replay"}.items()
    ]  # fmt: skip
    return jobs


def _full8b(settings: Settings) -> list[Job]:
    shape = settings.shape("full")
    return [
        _training(
            f"full8b/{way} with states on {states}",
            settings,
            shape,
            way,
            4,
            limit_s=120,
            states=states,
        )
        for way, states in _FULL
    ]


def _lora(settings: Settings) -> list[Job]:
    shape = settings.shape("full")
    return [
        _training(
            f"lora/{way}, frozen layers on {frozen}", settings, shape, way, 6,
            limit_s=120, frozen=frozen,
        )
        for way, frozen in _LORA
    ]  # fmt: skip


def _timeline(settings: Settings) -> list[Job]:
    shape = settings.shape("stack")
    return [
        _training(f"timeline/{way}", settings, shape, way, 2, shows_spans=True)
        for way in ("none", "host", "recompute_host")
    ]


def _rok(settings: Settings) -> list[Job]:
    return [
        _training(
            f"rok/batch {batch} {way}", settings, settings.shape("stack", batch=batch), way, 6
        )
        for batch in _ROK_BATCHES[: settings.few(len(_ROK_BATCHES), 1)]
        for way in _ROK_WAYS
    ]


def _long(settings: Settings) -> list[Job]:
    return [
        _training(
            f"long/{seq} {way}",
            settings,
            settings.shape("stack", seq=seq, batch=1),
            way,
            4,
            limit_s=120,
        )
        for seq in _LONG[: settings.few(len(_LONG), 1)]
        for way in _LONG_WAYS
    ]


def _forward(settings: Settings) -> list[Job]:
    places = [
        Job(
            f"forward/evaluation, parameters on {place}",
            f"{_HERE}.forward:evaluation",
            120,
            {"place": place},
        )
        for place in ("device", "host", "ssd")
    ]
    return [
        *places,
        Job("forward/features of frozen layers", f"{_HERE}.forward:features", 120),
    ]


def _loss(settings: Settings) -> list[Job]:
    return [Job("loss/Llama-3's vocabulary", f"{_HERE}.commands:loss_bench", 150)]


PARTS: dict[str, tuple[str, Callable[[Settings], list[Job]]]] = {
    "facts": ("what the machine is: link, page-locking, launches, Python a storage, drive", _facts),
    "bits": ("each door has the bits of a training without it; gpu_check, device tests", _bits),
    "stack": ("8 layers of Llama-3 8B, bf16, 4096 and 8192 tokens, in all ways", _stack),
    "auto": ("the same with the planner, within three budgets", _auto),
    "full8b": ("all of Llama-3 8B, its optimizer states on the host and elsewhere", _full8b),
    "lora": (
        "adapters of all of Llama-3 8B, its frozen layers on the host, in few bits too",
        _lora,
    ),
    "timeline": ("what the device does in a step, lane by lane", _timeline),
    "rok": (
        "speed against peak memory, with other batches: the recompute-offload-keep curve",
        _rok,
    ),
    "long": ("one sequence of 32768 and 65536 tokens, from all stays to tiles", _long),
    "forward": (
        "Llama-3 8B evaluates unit by unit; epochs with what its frozen layers gave",
        _forward,
    ),
    "loss": ("output layer and loss at Llama-3's vocabulary", _loss),
}


def jobs(parts: list[str], settings: Settings) -> list[Job]:
    """The jobs of some parts, in their order."""
    found = [job for part in parts for job in PARTS[part][1](settings)]
    factor = settings.few(1, _DRY_LIMITS)
    return [replace(job, limit_s=factor * job.limit_s) for job in found]


def _training(
    name: str,
    settings: Settings,
    shape: Shape,
    way: str,
    num_steps: int,
    limit_s: float = _LIMIT_S,
    **more: Any,
) -> Job:
    arguments = {
        "way": way,
        "shape": shape,
        "num_steps": settings.few(num_steps, 2),
        "seconds": _SECONDS,
        **more,
    }
    return Job(name, f"{_HERE}.training:train", limit_s, arguments)
