# SPDX-License-Identifier: Apache-2.0
"""What a layer's forward finds in its modules, as it was before: `AttributeSnapshot`.

Note [What changes before backward]
A layer runs again in backward, and by then others may have changed its modules: `functional_call`
has put the model's own parameters back, `eval()` has been called, another adapter is active, its
parameters are frozen, hooks that were there for one forward pass are gone, the model has set
another condition for its next pass, or has taken it away. So all of that is kept, whether the first
run has changed it or not. Tensors are held as those among arguments are: Note [Tensors among
arguments]. Not held are parameters and views of them: FSDP gathers such ones anew, and they are
large. So a parameter that an optimizer's step has changed in place by then is an error. It is one
for autograd too, where autograd has saved the parameter, as it saves weights but no biases.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import types
from collections.abc import Iterable, Iterator, MutableMapping, Sequence, Set
from typing import Any

import numpy
import torch

from megatron.offload.integration.torch.noted_tensor import (
    Changes,
    NotedTensor,
    NotedTensors,
    is_strided,
    nodes_before,
    version_of,
)
from megatron.offload.integration.torch.parameter_snapshot import Place, changed_since
from megatron.offload.integration.torch.structures import ARRAYS, is_small_array, slots_of

# Torch's own, and what is in the place of the layer's forward while it runs.
_OF_EACH_MODULE = {*vars(torch.nn.Module()), "forward", "_compiled_call_impl"} - {"training"}
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if name.startswith("_forward_"))
_KEEPS_VIEWS = "FullyShardedDataParallel"  # FSDP1: attributes are views of what it gathers
_ABSENT: Any = object()
_CONTAINERS = (list, dict, set, collections.deque)
_NO_OBJECTS = (torch.nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)
_FREQUENT = {type(None), bool, int, float, str, torch.dtype, torch.device}
# Packages that gather parameters, or whose objects lead to all else in the process.
_WITH_STATES_OF_THEIR_OWN = {"torch", "deepspeed", "logging", "threading", "concurrent", "asyncio"}
_MOST_OBJECTS_DEEP = 3
_MOST_INSIDE = 1000  # of a container, that are looked at: not a vocabulary's words


class AttributeSnapshot:
    """What the attributes of a layer's modules held when this was made, for a second forward.

    A layer counts its calls, keeps a state for the next call, appends to a list of its own. So a
    forward that runs again finds all of that as the first one did, and leaves it as the first one
    did. It looks at plain attributes, at those of objects among them, at what lists, deques, dicts,
    sets and small arrays among these hold, and at tensors there, which may be changed in place; at
    parameters, whether they want a gradient, and at hooks of forward. `BufferSnapshot` has the
    buffers. See Note [What changes before backward].

    Args:
        layer: it.
        changes: of its earlier calls.
        arguments: that it is called with. Modules among them are looked at as its own are.
        copies: whether it is to run again. Else this only sees what it changes.

    Attributes:
        modules: of the layer, and those that it calls without having them among its modules: of a
            list that torch does not look into, of a bound method, of the arguments.
        parameters: of these, by their places.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        changes: Changes,
        arguments: Iterable[Any] = (),
        *,
        copies: bool = True,
    ) -> None:
        self._changes, self._copies = changes, copies
        self._layer = layer
        self.modules = list(_modules(layer))
        self._known = set(self.modules)
        self._begin: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._noted = NotedTensors()
        self._attributes: list[
            tuple[MutableMapping[str, Any], dict[str, Any]]
        ] = []  # and what they were
        self._containers: list[tuple[Any, Any]] = []  # and what was in them
        self._of_torch: list[tuple[Any, Any]] = []  # hooks and parameters, and what was in them
        self.parameters: dict[Place, torch.Tensor] = {}
        self._want_gradient: list[bool] = []  # of these
        self._copied: Set[Place] = frozenset()
        self._seen: set[int] = set()
        for one in arguments:
            if isinstance(one, torch.nn.Module):
                self._add(one)
        for module in self.modules:  # which gets those that are found on the way
            attributes = vars(module)
            self._note(attributes, 0)
            parameters = module._parameters
            if parameters and type(parameters) is dict:  # DeepSpeed's dict gathers what is read
                self._of_torch.append((parameters, parameters.copy()))
                there = [(name, one) for name, one in parameters.items() if one is not None]
                self.parameters.update({(id(module), name): one for name, one in there})
                self._want_gradient += [one.requires_grad for _, one in there]
            if module is not layer:  # it is the layer's forward that runs again
                self._of_torch += [(own, own.copy()) for one in _HOOKS if (own := attributes[one])]
        self._versions = self._parameter_versions()
        del self._layer, self._known, self._seen

    def _parameter_versions(self) -> list[int]:
        return [version_of(one) for one in self.parameters.values()]

    def _add(self, module: torch.nn.Module) -> None:
        """Looks at a module that is none of the layer's, and not around it."""
        if module in self._known:
            return
        inside = list(_modules(module))
        if self._layer not in inside:
            self.modules += [one for one in inside if one not in self._known]
            self._known.update(inside)

    def _note(self, owner: MutableMapping[str, Any], depth: int) -> None:
        """Notes attributes of a module, or of an object that a module has.

        Args:
            owner: has them.
            depth: of the object; 0: a module.
        """
        before: dict[str, Any] = {}
        for name, value in owner.items():
            if name in _OF_EACH_MODULE:
                continue
            if isinstance(value, torch.Tensor):
                if not _is_of_parameter(value):
                    before[name] = self._noted_as(value, name)
                continue
            before[name] = value
            if type(value) not in _FREQUENT:
                self._note_inside(value, name, depth)
        self._attributes.append((owner, before))

    def _note_inside(self, value: Any, name: str, depth: int) -> None:
        """Notes what a container, an object or a function has bound."""
        if isinstance(value, torch.nn.Module):
            self._add(value)
            return
        if isinstance(value, _NO_OBJECTS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        inside: Iterable[Any] = ()
        is_tuple = type(value) is tuple or hasattr(value, "_fields")
        if is_tuple or isinstance(value, _CONTAINERS):
            if not is_tuple:
                content = self._content(value, name)
                if content is not None:
                    self._containers.append((value, content))
            if len(value) <= _MOST_INSIDE:
                inside = value.values() if isinstance(value, dict) else value
        elif isinstance(value, ARRAYS):
            if is_small_array(value):
                self._containers.append((value, _copy_of(value)))
        elif isinstance(value, types.MethodType):
            inside = (value.__self__,)
        elif isinstance(value, functools.partial):
            inside = (value.func, *value.args, value.keywords)
        if depth < _MOST_OBJECTS_DEEP and type(value).__module__ != "builtins":
            for own in _attributes_of(value):
                self._note(own, depth + 1)
        for one in inside:
            if type(one) not in _FREQUENT and not isinstance(one, torch.Tensor):
                self._note_inside(one, name, depth)

    def _content(self, container: Any, name: str) -> Any:
        """What is in a container; None: parameters are."""
        values = list(container.values() if isinstance(container, dict) else container)
        if not any(isinstance(one, torch.Tensor) for one in values):
            return _copy_of(container)
        if any(isinstance(one, torch.Tensor) and _is_of_parameter(one) for one in values):
            return None
        values = [
            self._noted_as(one, name) if isinstance(one, torch.Tensor) else one for one in values
        ]
        if isinstance(container, dict):
            return dict(zip(container, values, strict=True))
        return values

    def _noted_as(self, tensor: torch.Tensor, name: str) -> NotedTensor:
        one = self._noted.get(id(tensor))
        if one is None:
            path = None, name
            one = self._noted[id(tensor)] = NotedTensor(tensor, path)
            one.is_held = True
            # The first call shows which are changed; until it ends there are copies of all.
            may_change = not self._changes.is_known or path in self._changes.copied
            is_plain = is_strided(tensor) and not tensor.is_inference()
            if self._copies and may_change and is_plain and not one.has_graph:
                one.copy = tensor.detach().clone()
        return one

    # -- After its forward ----------------------------------------------------------------------

    def counted(self) -> list[Place]:
        """The parameters that were changed in place since this was made."""
        changes = zip(self.parameters, self._parameter_versions(), self._versions, strict=True)
        return [place for place, now, before in changes if now != before]

    def keep_changed(
        self, results: Iterable[torch.Tensor] = (), copied: Set[Place] = frozenset()
    ) -> None:
        """That forward has ended: holds no more than what a second one needs.

        Args:
            results: tensors that the layer has computed.
            copied: places of parameters that others put back and compare.

        Raises:
            ChangedInPlaceError: it cannot run again as it is to.
        """
        advice = "have the layer put a new tensor there"
        self._noted.note_changes(self._changes, advice, copies=self._copies)
        if not self._copies:
            return
        self._versions = self._parameter_versions()  # a layer may write to its own
        self._copied = copied
        noted = self._noted.values()
        used = nodes_before(self._begin, results) if any(one.has_graph for one in noted) else set()
        for one in noted:
            one.settle(used)
        for now, before in self._attributes:
            added = {name for name in now if name not in before and name not in _OF_EACH_MODULE}
            before.update(
                {
                    name: _ABSENT
                    for name in added
                    if not (isinstance(now[name], torch.Tensor) and _is_of_parameter(now[name]))
                }
            )

    # -- When it runs again ---------------------------------------------------------------------

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the layer has what it had before.

        Raises:
            ChangedInPlaceError: a parameter was changed in place since, or the layer has failed,
                and a tensor that it had is no longer there.
        """
        for place in self.counted():
            if place not in self._copied:
                raise changed_since(place[1])
        found = self._noted.present()
        contents = [(one, _each(content, found)) for one, content in self._containers]
        contents += self._of_torch
        changed = [(one, before) for one, before in contents if not _holds_the_same(one, before)]
        resolved = [(now, _each(before, found)) for now, before in self._attributes]
        differing = [(now, _differing(now, before)) for now, before in resolved]
        # As they are now, which the second run may change too where they are as before: what the
        # model has taken away or put back since.
        containers = [*contents, *((one, _copy_of(one)) for one, _ in changed)]
        attributes = resolved + [
            (now, {name: now.get(name, _ABSENT) for name in before}) for now, before in differing
        ]
        frozen = [
            (one, wanted)
            for one, wanted in zip(self.parameters.values(), self._want_gradient, strict=True)
            if one.requires_grad is not wanted
        ]
        for container, before in changed:
            _fill(container, before)
        for now, before in differing:
            _set(now, before)
        for parameter, wanted in frozen:
            parameter.requires_grad_(wanted)
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            advice = "leave them as they are until backward, or do not recompute the layer"
            self._noted.explain(error, "the attributes of its modules", advice)
            raise
        finally:
            for now, present in attributes:
                _set(now, present)
            for container, content in containers:
                if not _holds_the_same(container, content):
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


class _Slots(MutableMapping[str, Any]):
    """Attributes of an object whose class has slots, as a dict has those of others."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _attributes_of(value: Any) -> Iterator[MutableMapping[str, Any]]:
    """Those of an object that holds what a layer is to do: a configuration, a processor."""
    if isinstance(value, _NO_OBJECTS):
        return
    if type(value).__module__.partition(".")[0] in _WITH_STATES_OF_THEIR_OWN:
        return
    own = getattr(value, "__dict__", None)
    if type(own) is dict:
        yield own
    if names := slots_of(type(value)):
        yield _Slots(value, names)


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _copy_of(container: Any) -> Any:
    """What is in it now, whatever its class makes of copies."""
    if isinstance(container, ARRAYS):
        return copy.copy(container)
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _each(values: Any, function: Any) -> Any:
    """A container with what the function makes of each value of it."""
    if isinstance(values, dict):
        return {name: function(value) for name, value in values.items()}
    if isinstance(values, ARRAYS):
        return values
    return type(values)(map(function, values))


def _differing(now: MutableMapping[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in before.items() if now.get(name, _ABSENT) is not one}


def _set(attributes: MutableMapping[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _holds_the_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects: equality is no matter of tensors."""
    if isinstance(one, ARRAYS):
        return _bytes_of(one) == _bytes_of(other)
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    if isinstance(one, set):
        return bool(one == set(other))
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, numpy.ndarray):
        container[...] = content
        return
    if isinstance(container, ARRAYS):
        container[:] = content
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in content.items():  # some, such as model outputs, refuse `update`
            container[key] = value
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _bytes_of(values: Any) -> bytes:
    return bytes(values) if isinstance(values, bytearray) else values.tobytes()
