# SPDX-License-Identifier: Apache-2.0
"""Random trainings: `draw_program` draws them from seeds, `run` carries them out.

`smaller` has those that are a little smaller than a failing one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.offload import OffloadError
from tests.support import rare_events, usual_events
from tests.support.random_models import BODIES
from tests.support.random_trainings import NOT_COMPLEX, OPTIMIZERS, Offloads, Program, Run, Settings

EVENTS = {**usual_events.EVENTS, **rare_events.EVENTS}
_WEIGHTS = {**usual_events.EVENTS.weights, **rare_events.EVENTS.weights}
_LAST = ("look", 0, 0)


def run(program: Program, directory: Path | None) -> Run:
    """Carries a program out, offloaded if there is a directory, as far as offload refuses nothing.

    Everything is compared at the end, once with what is offloaded and once behind `close`.
    """
    torch.manual_seed(2)
    one = Run(program, directory)
    torch.manual_seed(3)
    try:
        try:
            one.open()
        except OffloadError as error:
            one.refusal = error
        for name, a, b in (*program.events, _LAST):
            if one.refusal is None:
                one.carry_out(EVENTS[name], a, b)
    finally:
        try:
            one.close()
        except OffloadError as error:
            one.refusal = one.refusal or error
    if one.refusal is None:
        one.carry_out(EVENTS["look"], 0, 0)
    while one.hooks:
        one.hooks.pop().remove()
    return one


def difference(ours: Run, plain: Run, program: Program) -> str | None:
    """The first event that shows something else, in words; None: all bits are the same."""
    events = (*program.events, _LAST, ("look behind close", 0, 0))
    for number, (mine, theirs) in enumerate(zip(ours.records, plain.records, strict=False)):
        if mine != theirs:
            names = [k for k in {**theirs, **mine} if mine.get(k) != theirs.get(k)]
            name = names[0]
            return (
                f"event {number} {events[number]}: {len(names)} differ, {name}: "
                f"{mine.get(name)} instead of {theirs.get(name)}"
            )
    return None


def _activations(draw: random.Random) -> Settings | None:
    mode = draw.choice(
        [None, "host", "ssd", "tiered"] * 4 + ["host", "ssd", "keep", "keep", "auto"]
    )
    if mode is None:
        return None
    settings: dict[str, Any] = {"mode": mode, "min_bytes": draw.choice([1, 1, 64, 300])}
    if mode != "keep" and draw.random() < 0.4:
        settings["replay"] = draw.choice(["on", "off"])
    if mode in ("ssd", "tiered"):
        settings["io"] = draw.choice(["auto", "buffered"])
        if draw.random() < 0.3:
            settings["verify"] = "checksum"
        if draw.random() < 0.2:
            settings["ssd_budget_bytes"] = 1 << 16
    if mode in ("host", "tiered"):
        settings["host_budget"] = draw.choice([1 << 12, 1 << 16, 1 << 20])
    if mode not in ("keep", "auto") and draw.random() < 0.4:
        settings["inflight_bytes"] = draw.choice([settings["min_bytes"], 1024, 1 << 20])
    if mode != "auto" and draw.random() < 0.3:
        settings["recompute_layers"] = draw.choice(["0", "0-1", "all"])
        if mode in ("ssd", "host", "tiered") and draw.random() < 0.5:
            settings["recompute_input"] = mode
    if mode == "auto":
        settings["memory_budget_bytes"] = draw.choice(["100KiB", "1MiB", "1GiB"])
    return settings


def _states(draw: random.Random) -> Settings | None:
    mode = draw.choice([None, "host", "host", "ssd", "tiered", "auto"])
    if mode is None:
        return None
    settings: dict[str, Any] = {"mode": mode, "bucket_bytes": draw.choice([256, 2048, 1 << 20])}
    if mode != "auto":
        settings["window_bytes"] = draw.choice([0, 0, 4096, 1 << 20])
    if mode in ("host", "tiered"):
        settings["host_budget"] = 1 << 22 if mode == "host" else draw.choice([1 << 12, 1 << 20])
    return settings


def _parameters(draw: random.Random) -> Settings | None:
    mode = draw.choice([None, None, "host", "host", "ssd", "tiered"])
    if mode is None:
        return None
    settings: dict[str, Any] = {"mode": mode}
    if mode in ("host", "tiered"):
        settings["host_budget"] = 1 << 22
    if draw.random() < 0.3:
        settings["live_units"] = 3
    return settings


def _offloads(
    draw: random.Random, optimizer: str, *, layer_major: bool, gradients: bool
) -> Offloads:
    activations, states, parameters = _activations(draw), _states(draw), _parameters(draw)
    if optimizer == "lbfgs" and draw.random() < 0.9:
        states = None
    if parameters is not None and gradients:
        parameters = {**parameters, "gradients": "on"}
    moves = (activations or {}).get("mode") in ("ssd", "host", "tiered")
    if activations is not None and moves and layer_major and draw.random() < 0.3:
        activations = {**activations, "boundary": draw.choice(["host", "ssd"])}
    if activations is None and states is None and parameters is None:
        activations = {"mode": "host", "min_bytes": 1}
    together = draw.random() < 0.5
    return Offloads(activations, states, parameters, layer_major, together)


# A layer-major step that draws others than the one before has another dropout: layer-major.md.
DRAW_RANDOM_NUMBERS = (
    *("mlp", "attention", "encoder", "checkpointed", "reentrant", "skipped", "packed"),
)
CHANGE_RANDOM_NUMBERS = ("change_shape", "add_group", "replace_layer", "toggle_training", "reorder")
FLOAT32 = ("fourier", "orthogonal", "spectral_norm", "counting", "packed")
WITH_GRADIENTS_AWAY = (
    *("train", "evaluate", "look", "save", "load", "copied", "average", "write", "schedule"),
    *("reopen", "change_shape", "toggle_training", "add_group", "swapped", "change_states"),
)


def draw_program(seed: int) -> Program:
    """The training of a seed."""
    draw = random.Random(seed)
    optimizer = draw.choice([*OPTIMIZERS, "adamw", "adamw", "sgd", "adamw, fused"])
    bodies = sorted(BODIES)
    if optimizer in NOT_COMPLEX:
        bodies.remove("fourier")
    layer_major = draw.random() < 0.2
    gradients = layer_major and draw.random() < 0.3
    if layer_major:
        bodies.remove("experts")  # whose penalty a model may not keep as an attribute
    names = [name for name in EVENTS if not gradients or name in WITH_GRADIENTS_AWAY]
    if layer_major and draw.random() < 0.5:
        names = [name for name in names if name not in CHANGE_RANDOM_NUMBERS]
        bodies.remove("skipped")
    elif layer_major:
        bodies = [kind for kind in bodies if kind not in DRAW_RANDOM_NUMBERS]
    dtype = draw.choice([torch.float32] * 6 + [torch.bfloat16, torch.float64])
    if dtype is not torch.float32:
        bodies = [kind for kind in bodies if kind not in FLOAT32]
    kinds = tuple(draw.choice(bodies) for _ in range(draw.randint(2, 4)))
    events = draw.choices(names, [_WEIGHTS[name] for name in names], k=draw.randint(3, 14))
    return Program(
        kinds=kinds,
        optimizer=optimizer,
        events=tuple((name, draw.randrange(8), draw.randrange(8)) for name in events),
        first=_offloads(draw, optimizer, layer_major=layer_major, gradients=gradients),
        then=_offloads(draw, optimizer, layer_major=layer_major, gradients=gradients),
        num_groups=draw.choice([1, 1, 2, 3]),
        tied=draw.random() < 0.3,
        calls_again=draw.random() < 0.15,
        dtype=dtype,
        critic=draw.random() < 0.2 and not layer_major,
        settles=draw.random() < 0.5,
    )


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller, for a search for the smallest one that fails."""
    events = program.events
    for size in (len(events) // 2, 4, 2, 1):
        for start in range(0, len(events), max(size, 1)):
            if size:
                yield replace(program, events=events[:start] + events[start + size :])
    for number in range(len(program.kinds)):
        if len(program.kinds) > 2:
            kinds = program.kinds[:number] + program.kinds[number + 1 :]
            yield replace(program, kinds=kinds)
        if program.kinds[number] != "mlp":
            kinds = (*program.kinds[:number], "mlp", *program.kinds[number + 1 :])
            yield replace(program, kinds=kinds)
    plain: dict[str, Any] = {
        "num_groups": 1, "tied": False, "dtype": torch.float32, "calls_again": False,
        "critic": False, "settles": False,
        "optimizer": "sgd", "then": program.first,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    for which in ("first", "then"):
        offloads = getattr(program, which)
        for name in ("activations", "states", "parameters"):
            settings = getattr(offloads, name)
            if settings is None:
                continue
            yield replace(program, **{which: replace(offloads, **{name: None})})
            for key in settings:
                if key not in ("mode", "min_bytes"):
                    fewer = {k: v for k, v in settings.items() if k != key}
                    yield replace(program, **{which: replace(offloads, **{name: fewer})})
            if settings["mode"] != "host":
                simple = {**settings, "mode": "host"}
                yield replace(program, **{which: replace(offloads, **{name: simple})})
        for name in ("layer_major", "together"):
            if getattr(offloads, name):
                yield replace(program, **{which: replace(offloads, **{name: False})})
    for number, (name, a, b) in enumerate(events):
        for simple in ((name, 0, 0), (name, a, 0), (name, 0, b)):
            if simple != events[number]:
                yield replace(program, events=(*events[:number], simple, *events[number + 1 :]))


def smallest(program: Program, fails: Callable[[Program], bool], *, within_s: float) -> Program:
    """A small program that fails as well, found within some seconds."""
    until_s, is_smaller = time.monotonic() + within_s, True
    while is_smaller:
        is_smaller = False
        for one in smaller(program):
            if time.monotonic() > until_s:
                break
            if fails(one):
                program, is_smaller = one, True
                break
    return program
