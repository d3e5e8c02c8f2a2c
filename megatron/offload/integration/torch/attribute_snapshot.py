# SPDX-License-Identifier: Apache-2.0
"""What a layer's forward finds in its modules, as it was before: `AttributeSnapshot`.

Note [What changes before backward]
A layer runs again in backward, and by then others may have changed its modules: `functional_call`
has put the model's own parameters back, `eval()` has been called, another adapter is active, its
parameters are frozen, hooks that were there for one forward pass are gone. So all of that is kept,
whether the first run has changed it or not. A tensor that is a plain attribute is kept only if the
first run has changed it: FSDP gathers such ones anew, and they are large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Torch's own, and what is in the place of the layer's forward while it runs.
_OF_EACH_MODULE = {*vars(torch.nn.Module()), "forward", "_compiled_call_impl"} - {"training"}
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.startswith("_forward_"))
_KEEPS_VIEWS = "FullyShardedDataParallel"  # FSDP1: attributes are views of what it gathers
_SMALL_BYTES = 1 << 16  # of a tensor that is copied because it may be changed in place
_ABSENT = object()
_CONTAINERS = (list, dict, set)


class AttributeSnapshot:
    """What the attributes of a layer's modules held when this was made, for a second forward.

    A layer counts its calls, keeps a state for the next call, appends to a list of its own. So a
    forward that runs again finds all of that as the first one did, and leaves it as the first one
    did. It looks at plain attributes, at what lists, dicts and sets among them hold, and at small
    tensors without a graph, which may be changed in place; at parameters, whether they want a
    gradient, and at hooks of forward. `BufferSnapshot` has the buffers. See Note [What changes
    before backward].
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # and what they were
        self._containers: list[tuple[Any, Any]] = []  # and what was in them
        self._tensors: list[tuple[dict[str, Any], str, int, torch.Tensor]] = []
        self._of_torch: list[tuple[Any, Any]] = []  # hooks and parameters, and what was in them
        self._wants_gradient: list[tuple[torch.Tensor, bool]] = []
        for module in _modules(layer):
            attributes = vars(module)
            before = {name: one for name, one in attributes.items() if name not in _OF_EACH_MODULE}
            self._attributes.append((attributes, before))
            parameters = module._parameters
            if parameters and type(parameters) is dict:  # DeepSpeed's dict gathers what is read
                self._of_torch.append((parameters, parameters.copy()))
                self._wants_gradient += [
                    (one, one.requires_grad) for one in parameters.values() if one is not None
                ]
            if module is not layer:  # it is the layer's forward that runs again
                self._of_torch += [(own, own.copy()) for one in _HOOKS if (own := attributes[one])]
            for name, value in before.items():
                if isinstance(value, _CONTAINERS):
                    self._containers.append((value, value.copy()))
                elif isinstance(value, torch.Tensor) and _may_be_changed(value):
                    self._tensors.append((attributes, name, value._version, value.clone()))

    def keep_changed(self) -> None:
        """That forward has ended: lets go of tensors that it has left alone."""
        self._attributes = [(now, _kept(now, before)) for now, before in self._attributes]
        self._containers = [
            (now, before)
            for now, before in self._containers
            if not _has_tensors(before) or not _holds_the_same(now, before)
        ]
        self._tensors = [
            (owner, name, version, copy)
            for owner, name, version, copy in self._tensors
            if isinstance(now := owner.get(name), torch.Tensor) and now._version != version
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the layer has what it had before."""
        others = [*self._of_torch, *self._containers]
        changed = [(one, before) for one, before in others if not _holds_the_same(one, before)]
        containers = [(one, one.copy()) for one, _ in changed]
        differing = [(now, _differing(now, before)) for now, before in self._attributes]
        attributes = [
            (now, {name: now.get(name, _ABSENT) for name in before}) for now, before in differing
        ]
        tensors = [(owner, {name: owner.get(name, _ABSENT)}) for owner, name, *_ in self._tensors]
        frozen = [one for one in self._wants_gradient if one[0].requires_grad is not one[1]]
        for container, before in changed:
            _fill(container, before)
        for owner, name, _, copy in self._tensors:
            owner[name] = copy.clone()
        for now, before in differing:
            _set(now, before)
        for parameter, wanted in frozen:
            parameter.requires_grad_(wanted)
        try:
            yield
        finally:
            for now, present in (*attributes, *tensors):
                _set(now, present)
            for container, content in containers:
                _fill(container, content)
            for parameter, wanted in frozen:
                parameter.requires_grad_(not wanted)


def _modules(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    found = [layer]
    seen: set[torch.nn.Module] = set()
    while found:
        module = found.pop()
        if module not in seen and type(module).__name__ != _KEEPS_VIEWS:
            seen.add(module)
            yield module
            found += module.children()


def _may_be_changed(tensor: torch.Tensor) -> bool:
    return (
        not tensor.requires_grad
        and not tensor.is_inference()
        and tensor.layout is torch.strided
        and tensor.nbytes <= _SMALL_BYTES
    )


def _kept(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What those attributes were, but for tensors that are the same now."""
    kept = {
        name: value
        for name, value in before.items()
        if not isinstance(value, torch.Tensor) or now.get(name, _ABSENT) is not value
    }
    for name in now:
        if name not in before and name not in _OF_EACH_MODULE:
            kept[name] = _ABSENT
    return kept


def _differing(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in before.items() if now.get(name, _ABSENT) is not one}


def _has_tensors(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(one, torch.Tensor) for one in values)


def _set(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _holds_the_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects: equality is no matter of tensors."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def _fill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
