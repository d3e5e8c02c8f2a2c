# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama with and without tiles under ZeRO-3, for test_deepspeed.py, on each rank.

Prints what is said where tiles come too late, and, for each setting: how far weights are apart
after some steps, relative to how far they have gone, how often a parameter heard of its gradient in
a step, and the lengths that a layer saw.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from megatron.offload import ConfigurationError, offload_activations
from tests.integrations.deepspeed_ranks import (
    ON_THE_HOST,
    PARAMETERS_TOO,
    ZERO_3,
    config_of,
    end,
    from_all,
    join,
    place_of,
)
from tests.support.text_models import checkpointed_llama, llama, text_batches

TILE = 7
NUM_STEPS = 4

SETTINGS: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": ZERO_3},
    # Which gathers ahead and keeps small parameters and those that are used again soon.
    "as it is": {"zero": {"stage": 3}},
    "checkpointed": {"zero": ZERO_3, "make_model": checkpointed_llama},
    "parameters on the host": {"zero": {**ZERO_3, **ON_THE_HOST, **PARAMETERS_TOO}},
}


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of them, on each rank."""
    full = [safe_get_full_fp32_param(one) for one in model.parameters()]
    return torch.cat([one.detach().flatten().double() for one in full if one is not None])


def batches() -> list[dict[str, torch.Tensor]]:
    """Of this rank; in every other step the first rank's are shorter than a tile."""
    found = text_batches(dist.get_rank(), NUM_STEPS)
    for number, batch in enumerate(found):
        if number % 2 and dist.get_rank() == 0:
            batch.update({name: one[:, :3] for name, one in batch.items()})
    return found


def trained(setting: dict[str, Any], folder: Path, tiled_mlp: str | int) -> dict[str, Any]:
    torch.manual_seed(5)
    model: Any = setting.get("make_model", llama)().train()
    options: dict[str, Any] = {"min_bytes": "4KiB", "tiled_mlp": tiled_mlp}
    handle = offload_activations(model, folder, **options)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(setting)
    )
    heard: collections.Counter[int] = collections.Counter()
    for one in engine.module.parameters():
        one.register_post_accumulate_grad_hook(lambda p: heard.update([p.ds_id]))
    seen = []
    up = engine.module.model.layers[0].mlp.up_proj
    own = up.forward
    up.forward = lambda x: (seen.append(x.shape[-2]), own(x))[1]
    began, losses = weights(engine.module), []
    with handle:
        for number, batch in enumerate(batches()):
            if number == 2:
                engine.eval()
                with torch.no_grad():
                    engine(**batch)
                engine.train()
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    ended = weights(engine.module)
    engine.destroy()
    counts = sorted({count / NUM_STEPS for count in heard.values()})
    return {"began": began, "ended": ended, "heard": counts, "seen": seen, "losses": losses}


def refused() -> str:
    """What is said where DeepSpeed has its hooks already."""
    engine, *_ = deepspeed.initialize(model=llama(), config=config_of(SETTINGS["zero 3"]))
    batch = text_batches(dist.get_rank(), 1)[0]
    with offload_activations(engine, mode="off", tiled_mlp=TILE):
        try:
            engine(**batch)
        except ConfigurationError as error:
            return str(error)
        finally:
            engine.destroy()
    return ""


def compared(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    alone, tiles = (trained(setting, folder, one) for one in ("off", TILE))
    went = (alone["ended"] - alone["began"]).norm()
    return {
        "off": float((tiles["ended"] - alone["ended"]).norm() / went),
        "heard": [alone["heard"], tiles["heard"]],
        "seen": [sorted(set(one["seen"])) for one in (alone, tiles)],
        "losses": [alone["losses"], tiles["losses"]],
    }


def main(folder: Path, names: list[str]) -> None:
    join()
    found: dict[str, Any] = {"refused": refused()}
    for name in names or SETTINGS:
        found[name] = compared(SETTINGS[name], place_of(folder, name))
    end(from_all(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
