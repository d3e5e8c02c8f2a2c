# SPDX-License-Identifier: Apache-2.0
"""Jobs: what of forward passes need not run, or need not read, twice.

`evaluation`: a whole model's losses of several batches, its parameters on a tier, by a loop and by
`LayerMajor.evaluate`, which reads each layer once for all of them. `features`: epochs of a training
whose first layers are frozen, with `cache_frozen` and without. Losses are compared bit by bit.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from check.gpu.parity import deterministic
from check.gpu_day.bits import ATTENTION
from check.gpu_day.link import finish
from check.gpu_day.models import make_model, make_tokens
from check.gpu_day.settings import Settings, Shape
from megatron.offload import LayerMajor, cache_frozen, offload_parameters
from megatron.offload.device.open import open_device
from megatron.offload.machine import vector_math

Note = Callable[[dict[str, Any]], None]
_NUM_BATCHES = 8
_LOOP_BATCHES = 2  # of the loop on a drive, which reads the whole model for each
_EPOCHS = 3
_FROZEN_SHARE = 4  # one layer in so many is trained


def evaluation(settings: Settings, note: Note, *, place: str) -> dict[str, Any]:
    """Evaluates all of Llama-3 8B.

    Args:
        settings: of the run.
        note: takes what was found so far.
        place: of the parameters: `device`, `host` or `ssd`.

    Raises:
        AssertionError: the two ways have other losses.
    """
    vector_math.first_call()
    shape = settings.shape("full")
    model = make_model(shape, settings.device).eval().requires_grad_(False)
    batches = make_tokens(shape, _NUM_BATCHES, settings.device)
    found: dict[str, Any] = {"place": place, "tokens": shape.tokens}
    handle = None
    if place != "device":
        budget = settings.states_budget_bytes
        where = {"host_budget": budget} if place == "host" else {"directory": settings.directory}
        handle = offload_parameters(model, mode=place, **where)
        assert handle.window is not None
        for unit in handle.window.units:
            unit.wait_for_write()

    def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    def loop(count: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [loss_of(model, one) for one in batches[:count]]

    def measured(name: str, run: Callable[[], list[torch.Tensor]]) -> list[float]:
        found[name], losses = _measured(settings, handle, run)
        note(found)
        return losses

    loop(1)  # kernels are chosen, memory is made
    warm = 2 if place == "ssd" else _NUM_BATCHES  # all of its memory, where that is no long wait
    count = _LOOP_BATCHES if place == "ssd" else _NUM_BATCHES
    losses = measured("loop", lambda: loop(count))
    if handle is not None:
        layer_major = LayerMajor(model)
        layer_major.evaluate(batches[:warm], loss_of)
        again = measured("evaluate", lambda: layer_major.evaluate(batches, loss_of))
        layer_major.close()
        assert again[:count] == losses, f"other losses: {again[:count]}, not {losses}"
        found["identical"] = True
        handle.close(restore=False)
    return found


def _measured(
    settings: Settings, handle: Any, run: Callable[[], list[torch.Tensor]]
) -> tuple[dict[str, Any], list[float]]:
    """Seconds a batch, bytes that were read, memory; and the losses."""
    device = open_device(settings.device)
    before = 0 if handle is None else handle.statistics["read_bytes"]
    finish(device)
    peak = device.peak_reader()
    peak.reset()
    base_bytes = device.allocated_bytes()
    began_s = time.perf_counter()
    losses = run()
    finish(device)
    seconds = time.perf_counter() - began_s
    read = 0 if handle is None else handle.statistics["read_bytes"] - before
    figures = {
        "batches": len(losses),
        "batch_s": seconds / len(losses),
        "read_bytes": read,
        "base_bytes": base_bytes,
        "peak_bytes": peak.peak_bytes(),
    }
    return figures, [float(one) for one in losses]


def features(settings: Settings, note: Note) -> dict[str, Any]:
    """Trains the last quarter of a Llama's layers, with what the others gave in files and without.

    Raises:
        AssertionError: losses differ, or nothing was found in the files.
    """
    vector_math.first_call()
    shape = replace(settings.shape("full"), batch=1)
    found: dict[str, Any] = {"rows": _NUM_BATCHES, "tokens": shape.tokens}
    with deterministic(), torch.nn.attention.sdpa_kernel(ATTENTION):
        for way in ("without", "with"):
            found[way] = []
            for epoch in _epochs(settings, shape, is_cached=way == "with"):
                found[way].append(epoch)
                note(found)
    losses = [[epoch.pop("losses") for epoch in found[way]] for way in ("without", "with")]
    assert losses[0] == losses[1], f"other losses: {losses[1]}, not {losses[0]}"
    hits = found["with"][-1]["hit_rows"]
    assert hits == _NUM_BATCHES * (_EPOCHS - 1), f"{hits} rows were found in files"
    found["identical"] = True
    found["later_ratio"] = found["with"][-1]["seconds"] / found["without"][-1]["seconds"]
    found["first_ratio"] = found["with"][0]["seconds"] / found["without"][0]["seconds"]
    return found


def _epochs(settings: Settings, shape: Shape, *, is_cached: bool) -> Iterator[dict[str, Any]]:
    model = make_model(shape, settings.device)
    model.requires_grad_(False)
    first_trained = shape.layers - max(shape.layers // _FROZEN_SHARE, 1)
    for layer in model.model.layers[first_trained:]:
        layer.requires_grad_(True)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    batches = make_tokens(shape, _NUM_BATCHES + 1, torch.device("cpu"))
    device = open_device(settings.device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(settings.device)
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = step(batches.pop())  # kernels are chosen, states are made
    with tempfile.TemporaryDirectory(dir=settings.directory) as folder:
        cache = cache_frozen(model, folder) if is_cached else None
        for epoch in range(_EPOCHS):
            finish(device)
            began_s = time.perf_counter()
            ahead = batches if cache is None else cache.ahead(batches)
            losses = [step(one) for one in ahead]
            finish(device)
            figures: dict[str, Any] = {"seconds": time.perf_counter() - began_s}
            if cache is not None:
                cache.store.wait_for_writes()
                figures |= cache.statistics
            figures["losses"] = [float(one) for one in ([first] if epoch == 0 else []) + losses]
            yield figures
        if cache is not None:
            cache.close()
