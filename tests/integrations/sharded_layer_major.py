# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of models that FSDP2 has sharded; test_sharded_layer_major.py starts it.

Prints, for each setting: whether every bit is that of a loop over micro-batches that reduces
gradients in the last one, and how often each module was gathered and reduced in the last step.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron.offload import ConfigurationError, LayerMajor, offload_activations
from megatron.offload.integration.torch.stationary import parameter_groups
from tests.behaviour.test_layer_major_steps import (
    VOCABULARY,
    Checkpointed,
    Language,
)
from tests.support.ranks import init_process_group
from tests.support.same_training import digest, gradients_of

MICRO_BATCHES, STEPS, UNITS = 8, 3, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Step = Callable[[list[torch.Tensor]], list[torch.Tensor]]
MakeStep = Callable[[Any], Step]
PASSES: dict[str, collections.Counter[str]] = {}
ON_REDUCTION: list[Callable[[], None]] = []


def fsdp(model: Any, *, alone: tuple[Any, ...] = (), **settings: Any) -> None:
    """Shards each layer, what is to be sharded alone, and the rest."""
    settings.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in model.layers:
        fully_shard(layer, **settings)
    for one in alone:
        fully_shard(one, **settings)
    fully_shard(model, **settings)


def fsdp_alone(model: Any) -> None:
    fsdp(model, alone=(model.embedding, model.output))


def fsdp_together(model: Any) -> None:
    fsdp(model, alone=([model.embedding, model.output],))


def fsdp_pairs(model: Any) -> None:
    """Layers of one unit, and layers of several, wrapped as one."""
    layers = model.layers
    for group in ([layers[0], layers[1]], [layers[2], model.embedding], [layers[3], layers[4]]):
        fully_shard(group)
    fully_shard(model)


def fsdp_layers_only(model: Any) -> None:
    for layer in model.layers:
        fully_shard(layer)


def hybrid(model: Any) -> None:
    ranks = dist.get_world_size()
    fsdp(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "shard")))


def two_dimensional(model: Any) -> None:
    """Tensor parallelism within layers, FSDP across."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    fsdp(model, mesh=mesh["data"])


def prefetching(model: Any) -> None:
    """What is gathered ahead is the user's choice: two layers in each direction."""
    fsdp(model)
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])


def with_settings(**settings: Any) -> Callable[[Any], None]:
    return lambda model: fsdp(model, **settings)


def one_by_one(model: Any) -> Step:
    def step(batches: list[torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            for module in model.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(batch is batches[-1], recurse=False)
            loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step


def unit_by_unit(model: Any, **settings: Any) -> Step:
    layer_major = LayerMajor(model, UNITS, **settings)
    return lambda batches: layer_major.step(batches, model)


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return [torch.randint(VOCABULARY, (2, 16), generator=draw) for _ in range(MICRO_BATCHES)]


def train(model: Any, step: Step, num_steps: int = STEPS) -> dict[str, Any]:
    """Digests of losses, gradients and weights of a few steps; what happened in the last."""
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    unreduced: list[int] = []
    ON_REDUCTION[:] = [lambda: unreduced.append(unreduced_bytes(model))]
    for number in range(num_steps):
        for counter in PASSES.values():
            counter.clear()
        found["losses"].append([digest(loss) for loss in step(micro_batches(number))])
        found["gradients"].append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: digest(one) for name, one in model.named_parameters()}
    found["random"] = digest(torch.get_rng_state())
    found["passes"] = {kind: dict(counter) for kind, counter in PASSES.items()}
    found["passes"]["unreduced"] = max(unreduced)
    return found


def new(wrap: Callable[[Any], None], kind: Callable[[], Any] = Language) -> Any:
    model = kind()
    wrap(model)
    return model


def states_of(model: Any) -> list[Any]:
    return [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]


def settings_of(model: Any) -> list[Any]:
    """What a user may have set, of all modules."""
    return [
        (g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward, g.post_forward_mesh_info)
        for state in states_of(model)
        for g in parameter_groups(state)
    ] + [state._state_ctx.is_last_backward for state in states_of(model)]


def unreduced_bytes(model: Any) -> int:
    """What gradients take that wait, whole, for their reduction."""
    total = 0
    for parameter in {
        one
        for state in states_of(model)
        for group in parameter_groups(state)
        for one in group.fsdp_params
    }:
        gradients = [parameter.unsharded_accumulated_grad]
        if hasattr(parameter, "_unsharded_param"):
            gradients.append(parameter._unsharded_param.grad)
        total += sum(one.nbytes for one in gradients if one is not None)
    return total


def compared(
    wrap: Callable[[Any], None],
    kind: Callable[[], Any] = Language,
    *,
    folder: Path | None = None,
    wraps_first: bool = True,
    num_steps: int = STEPS,
    **settings: Any,
) -> dict[str, Any]:
    """A training in the usual order, and the same in units."""
    usual = new(wrap, kind)
    expected = train(usual, one_by_one(usual), num_steps)
    for module in usual.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(True)
    model = kind()
    if wraps_first:
        wrap(model)
    with contextlib.ExitStack() as contexts:
        if folder is not None:
            folder.mkdir(parents=True)
            offload = offload_activations(model, folder, min_bytes=1, **settings)
            contexts.enter_context(offload)
            step = unit_by_unit(model, offload=offload)
        else:
            step = unit_by_unit(model)
        if not wraps_first:
            wrap(model)
        after = train(model, step, num_steps)
        statistics = dict(offload.statistics) if folder is not None else {}
    ours, usuals = after.pop("passes"), expected.pop("passes")
    first, usual_first = after["gradients"][0], expected["gradients"][0]
    return {
        "same": [what for what in expected if after[what] == expected[what]],
        "settings": settings_of(model) == settings_of(usual),
        "differing": [name for name in usual_first if first.get(name) != usual_first[name]],
        "gathered": [ours["gathered"], usuals["gathered"]],
        "reduced": [ours["reduced"], usuals["reduced"]],
        "unreduced": [ours["unreduced"], usuals["unreduced"]],
        "moved": statistics.get("offloaded_bytes", 0),
        "plans": statistics.get("plans", 0),
    }


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Counts all-gathers and reduce-scatters by the first parameter that is in them."""

    def counted(name: str, kind: str) -> None:
        function = getattr(_fsdp_param_group, name)
        counter = PASSES[kind] = collections.Counter()

        def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            counter[parameters[0]._param_fqn] += 1
            if kind == "reduced":
                for listener in ON_REDUCTION:
                    listener()
            return function(parameters, *args, **kwargs)

        setattr(_fsdp_param_group, name, call)

    counted("foreach_all_gather", "gathered")
    counted("foreach_reduce", "reduced")
    yield


def frozen() -> Any:
    """Nothing in the first unit has a gradient: no backward pass of it runs."""
    model = Language()
    for module in (model.embedding, model.layers[0], model.layers[1]):
        module.requires_grad_(False)
    return model


def gradients_of_step(model: Any, step: Step, number: int) -> Any:
    """Digests of one step's gradients, whatever was before."""
    model.zero_grad()
    torch.manual_seed(100 * dist.get_rank() + number)
    step(micro_batches(number))
    return gradients_of(model)


def other_random_numbers() -> list[Any]:
    """One rank draws more than in the step before: the next step counts, on all ranks."""
    usual, model = new(fsdp), new(fsdp)
    usual_step, step = one_by_one(usual), unit_by_unit(model)
    found = []
    for number in range(4):
        if number == 1 and dist.get_rank() == 1:
            for one in (usual, model):
                one.layers[1].register_forward_hook(lambda *_: (torch.rand(3), None)[1])
        expected = gradients_of_step(usual, usual_step, number)
        PASSES["gathered"].clear()
        is_same = gradients_of_step(model, step, number) == expected
        found.append([is_same, PASSES["gathered"]["layers.0.norm.weight"]])
    return found


def after_errors() -> list[Any]:
    """Steps that follow ones that failed, in a forward pass, and in a backward pass; or why not."""
    usual, model = new(fsdp), new(fsdp)
    usual_step, step = one_by_one(usual), unit_by_unit(model)
    found, calls = [], 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError

    places = ((0, "forward_pre"), (3, "full_backward_pre"), (5, "full_backward_pre"))
    for number, (where, when) in enumerate(places):
        calls = 0
        hook = getattr(model.layers[where], f"register_{when}_hook")(fail)
        with contextlib.suppress(ZeroDivisionError):
            gradients_of_step(model, step, 10)
        hook.remove()
        expected = gradients_of_step(usual, usual_step, number)
        try:
            found += [calls == 3, gradients_of_step(model, step, number) == expected]
        except ConfigurationError as error:
            return [str(error)]
    return found


def accumulating() -> list[Any]:
    """Two steps, of which the user has the first reduce nothing."""
    usual, model = new(fsdp), new(fsdp)
    batches = micro_batches(0) + micro_batches(1)
    torch.manual_seed(dist.get_rank())
    one_by_one(usual)(batches)
    torch.manual_seed(dist.get_rank())
    step = unit_by_unit(model)
    PASSES["reduced"].clear()
    model.set_requires_gradient_sync(False)
    step(batches[:MICRO_BATCHES])
    is_reduced = bool(PASSES["reduced"] or gradients_of(model))
    model.set_requires_gradient_sync(True)
    step(batches[MICRO_BATCHES:])
    return [is_reduced, gradients_of(model) == gradients_of(usual), max(PASSES["reduced"].values())]


def root_around() -> str:
    """The model that LayerMajor gets is a part of what FSDP has sharded as one."""

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Language()
            self.scale = torch.nn.Parameter(torch.ones(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens) * self.scale.sum()

    model = Outer()
    for layer in model.inner.layers:
        fully_shard(layer)
    fully_shard(model)
    model(micro_batches(0)[0]).backward()
    try:
        LayerMajor(model.inner).step(micro_batches(0), model)
    except ConfigurationError as error:
        return str(error)
    return "no error"


SCENARIOS: dict[str, Callable[[], Any]] = {
    "other random numbers": other_random_numbers,
    "after errors": after_errors,
    "accumulating": accumulating,
    "root around": root_around,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "layers and root": {"wrap": fsdp},
    "offload": {"wrap": fsdp, "mode": "ssd"},
    "boundary": {"wrap": fsdp, "mode": "ssd", "boundary": "ssd"},
    "auto": {"wrap": fsdp, "mode": "auto", "max_slowdown": 1.0, "num_steps": 6},
    "recomputed": {"wrap": fsdp, "mode": "ssd", "recompute_layers": "2-4"},
    "checkpointed": {"wrap": fsdp, "kind": Checkpointed},
    "bf16": {"wrap": with_settings(mp_policy=BF16)},
    "not resharded": {"wrap": with_settings(reshard_after_forward=False)},
    "parameters on the host": {
        "wrap": with_settings(offload_policy=CPUOffloadPolicy(pin_memory=False))
    },
    "embedding and output alone": {"wrap": fsdp_alone},
    "embedding and output together": {"wrap": fsdp_together},
    "layers together": {"wrap": fsdp_pairs},
    "layers only": {"wrap": fsdp_layers_only},
    "sharded after LayerMajor": {"wrap": fsdp, "wraps_first": False},
    "frozen": {"wrap": fsdp, "kind": frozen},
    "tied, together": {"wrap": fsdp_together, "kind": lambda: Language(tied=True)},
    "tied, bf16": {"wrap": with_settings(mp_policy=BF16), "kind": lambda: Language(tied=True)},
    "prefetching": {"wrap": prefetching},
    "hybrid": {"wrap": hybrid},
    "two-dimensional": {"wrap": two_dimensional},
    "resharded to fewer": {"wrap": with_settings(reshard_after_forward=2)},
}


def main(folder: Path, names: list[str]) -> None:
    init_process_group()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with counting():
        for name in names:
            if name in SCENARIOS:
                own = SCENARIOS[name]()
            else:
                setting = dict(SETTINGS[name])
                if "mode" in setting:
                    setting["folder"] = folder / str(dist.get_rank()) / name
                own = compared(**setting)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
            found[name] = every
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
