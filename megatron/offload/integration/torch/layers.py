# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are its layers: `find_layers`. They give places their names.

What is not theirs alone: `params_outside`. What a training loop calls: `called_parts`.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron.offload.errors import ConfigurationError

# Of wrappers, in the names of modules: a plan fits the model whether it is wrapped or not.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_CHECKPOINTED = "GradientCheckpointingLayer"  # what transformers calls a layer


def find_layers(
    models: Sequence[torch.nn.Module], named: Iterable[str | type[torch.nn.Module]] | None = None
) -> dict[torch.nn.Module, str]:
    """The layers of models by their names, such as `model.layers.7`, in the order of the model.

    No layer is inside of another one. Where a model keeps the parts of each layer in a list
    (`ModuleList([ModuleList([attention, mlp]), ...])`), the parts are its layers.

    Args:
        models: with more than one, names begin with `0.`, `1.` and so on.
        named: classes, names of classes or patterns of module names; None: transformers' layers,
            or else modules with parts of their own that repeat in a ModuleList or Sequential. What
            TorchScript runs is no layer, for it takes no hooks.

    Raises:
        ConfigurationError: something that was named is not there, or is TorchScript.
    """
    found: dict[torch.nn.Module, str] = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for name, module in model.named_modules():
            found.setdefault(module, prefix + _plain(name))
    if named is not None:
        chosen = _named(found, list(named))
    else:
        chosen = [m for m in found if _CHECKPOINTED in _class_names(m)]
        chosen = chosen or list(_repeated(found))
    inside = {inner for one in chosen for inner in one.modules() if inner is not one}
    is_chosen = {called: None for one in chosen if one not in inside for called in _called(one)}
    for one in is_chosen if named is not None else ():
        if isinstance(one, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"layers= names {found[one]}, which is TorchScript and takes no hooks; leave it "
                "out, or give its place to the module that the script was made of"
            )
    return {module: name for module, name in found.items() if module in is_chosen}


def called_parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model, and the modules in it that a training loop may call in its place."""
    yield model
    for child in model.children():
        is_script = isinstance(child, torch.jit.ScriptModule)  # which takes no hooks
        if not is_script and any(True for _ in child.parameters()):
            yield child
            if len(list(model.children())) == 1:  # a wrapper
                yield from called_parts(child)


def params_outside(
    model: torch.nn.Module, layers: Iterable[torch.nn.Module]
) -> Iterator[torch.nn.Parameter]:
    """The parameters of modules that a model has outside of its layers, perhaps inside too."""
    seen, found = set(layers), [model]
    while found:
        module = found.pop()
        if module not in seen:
            seen.add(module)
            yield from module.parameters(recurse=False)
            found += module.children()


def _named(
    found: dict[torch.nn.Module, str], named: Sequence[str | type[torch.nn.Module]]
) -> list[torch.nn.Module]:
    chosen: list[torch.nn.Module] = []
    for one in named:
        if isinstance(one, str):
            own = [
                module
                for module, name in found.items()
                if one in _class_names(module) or fnmatch.fnmatchcase(name, one)
            ]
        else:
            own = [module for module in found if isinstance(module, one)]
        if not own:
            raise ConfigurationError(
                f"layers={one!r} names no module of the model; give a class, the name of a class "
                "or a pattern of module names such as model.layers.*"
            )
        chosen += own
    return chosen


def _repeated(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for module in modules:
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        own = [child for child in module.children() if any(True for _ in child.children())]
        own = [child for child in own if not isinstance(child, torch.jit.ScriptModule)]
        most = Counter(type(child) for child in own).most_common(1)
        if most and most[0][1] > 1:
            yield from (child for child in own if type(child) is most[0][0])


def _called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module; of a list or a dict, which no model calls, what it calls of that instead."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
    if not is_list or type(module).forward is not torch.nn.Module.forward:
        yield module
        return
    for child in module.children():
        if any(True for _ in child.parameters()):
            yield from _called(child)


def _class_names(module: torch.nn.Module) -> set[str]:
    return {one.__name__ for one in type(module).__mro__}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
