# SPDX-License-Identifier: Apache-2.0
"""What a frozen part's modules are, as they were last looked at: `FrozenState`.

Weights, buffers, settings and hooks decide what comes out of a part as its arguments do, so each
pass looks at all of them before it looks for a stored result.

Note [A second look]
Hundreds of modules are looked at in each pass, in the thread that launches operations. So a look
notes, of each module, its class, the names and values of its attributes, and what its dicts of
modules, parameters and buffers hold. Where the next one finds the same objects, all that was told
of them holds. What may change while it stays the same object (a list, a configuration) is told
anew, once for all modules that have it, and compared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.frozen.attributes import is_told_once, own_attributes, told_of
from megatron.offload.frozen.digests import (
    digest_of,
    environment,
    has_bytes,
    json_bytes,
    tensors_digest,
)
from megatron.offload.integration.hook import Hook
from megatron.offload.integration.open_parameters import unit_of
from megatron.offload.integration.open_streams import OPEN
from megatron.offload.integration.torch.frozen_calls import version_of

_INSIDE = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Attributes by which transformers remembers what it has done with a module.
_NOTES = ("_output_capturing_hooks_installed", "_is_hf_initialized")
_CAPTURES = "transformers.utils.output_capturing"
_SAMPLES = 8  # elements of each weight that are compared in each pass


class _Told(NamedTuple):
    """What was told of an attribute: its value, its JSON, the tensors in it and their places."""

    value: Any
    text: Any
    tensors: tuple[torch.Tensor, ...]
    places: tuple[tuple[int, int], ...]

    def is_as(self, other: _Told) -> bool:
        """Whether another value adds the same to the key, and has the same tensors."""
        is_same = self.text == other.text and self.places == other.places
        return is_same and _are_same(self.tensors, other.tensors)


class _Seen(NamedTuple):
    """A module at the last look; see Note [A second look].

    Attributes:
        module: itself.
        is_inner: it is not called where the part is skipped.
        values: its class, and names and values of its attributes.
        inside: what its dicts of modules, parameters and buffers hold.
        told: what its attributes add to the key, by name, and tensors in them.
    """

    module: torch.nn.Module
    is_inner: bool
    values: tuple[Any, ...]
    inside: tuple[Any, ...]
    told: dict[str, _Told]


class FrozenState:
    """Weights, buffers, attributes and hooks of the modules of a part.

    Args:
        modules: of the part, in the order of their calls.

    Attributes:
        value: of weights and settings, at the last look; another one where they have changed.
        known: its digest.
        device: of the weights.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._outer = modules
        self._forwards = {one: vars(one).get("forward") for one in self._modules()}
        self.value: tuple[Any, ...] = ()
        self.known = b""
        self.device = torch.device("cpu")
        self._seen: list[_Seen] = []  # none: the next look is a whole one
        self._plain: list[Any] = []  # what the modules add to the key
        self._changing: list[_Told] = []  # attributes that may change as they are
        self._known: set[int] = set()  # addresses of modules
        self._num_own = 0  # of the tensors, weights and buffers
        self._tensors: list[torch.Tensor] = []  # these, and what attributes hold
        self._weights: tuple[Any, bytes] = ((), b"")  # places of tensors, and their digest
        self._samples: list[torch.Tensor] = []  # some elements of each weight, in place
        self._sampled: list[torch.Tensor] = []  # and as they were

    def look(self) -> str:
        """Looks at all modules, weights and buffers; returns why nothing may be stored, or nothing.

        A weight that is changed in place through `.data`, which torch does not count, is found by
        some of its elements.
        """
        torch_modules: Any = torch.nn.modules.module
        if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
            return "all modules have hooks"
        if not self._is_as_seen() and (why := self._look_at_all()):
            return why
        if any(one.requires_grad for one in self._tensors):
            return "a weight in it is trained"
        if OPEN.parameters and any(unit_of(one) >= 0 for one in self._tensors):
            return "a weight in it is offloaded"
        places = _places(self._tensors)
        state = (places, self._plain)
        has_samples = self._has_samples()
        if state != self.value or not has_samples:
            if places != self._weights[0] or not has_samples:
                self._weights = (places, tensors_digest(self._tensors))
                self._take_samples()
            self._learn()
            self.value = state
        return ""

    def has_same_tensors(self) -> bool:
        """Whether weights and buffers are those of the last look, unchanged."""
        is_same = all(_are_same(_inside(vars(one.module)), one.inside) for one in self._seen)
        own = self._tensors[: self._num_own]
        return is_same and _places(own) == self.value[0][: len(own)] and self._has_samples()

    def changed_attribute(self) -> str:
        """The name of one that holds another value than at the last look; empty: there is none."""
        for one in self._seen:
            if not _are_same(_values(one.module), one.values):
                now = self._told(one.module)
                for name in now | one.told:
                    if name not in now or name not in one.told:
                        return name
                    if not now[name].is_as(one.told[name]):
                        return name
        for told in self._changing:
            if not self._told_of(told.value).is_as(told):
                names = (name for one in self._seen for name, x in one.told.items() if x is told)
                return next(names, "")
        return ""

    def _modules(self) -> Iterator[torch.nn.Module]:
        for one in self._outer:
            yield from one.modules()

    def _is_as_seen(self) -> bool:
        """Whether a look at all modules would find what the last one found."""
        for module, is_inner, values, inside, _ in self._seen:
            if not _are_same(_values(module), values):
                return False
            if not _are_same(_inside(vars(module)), inside):
                return False
            if is_inner and _has_listeners(vars(module)):
                return False
        return bool(self._seen) and all(
            self._told_of(one.value).is_as(one) for one in self._changing
        )

    def _look_at_all(self) -> str:
        """Looks at each module anew; returns why nothing may be stored, or nothing."""
        self._seen = []
        self._known = {id(one) for one in self._modules()}
        seen: list[_Seen] = []
        plain: list[Any] = []
        told_before: dict[int, _Told] = {}
        outer = {*self._outer}
        for module in self._modules():
            attributes = vars(module)
            is_inner = module not in outer
            if is_inner and (
                attributes.get("forward") is not self._forwards.get(module, self)
                or _has_listeners(attributes)
            ):
                return f"an inner {type(module).__name__} has hooks, or another forward"
            told = self._told(module, told_before)
            plain += [type(module).__qualname__, [(name, one.text) for name, one in told.items()]]
            seen.append(_Seen(module, is_inner, _values(module), _inside(attributes), told))
        own = [one for module in self._modules() for one in _tensors_in(module)]
        if not all(map(has_bytes, own)):
            return "a weight or a buffer in it is sparse or quantized"
        self._changing = list(told_before.values())
        of_attributes = {id(told): told for one in seen for told in one.told.values()}
        self._num_own = len(own)
        self._tensors = own + [one for told in of_attributes.values() for one in told.tensors]
        self._seen, self._plain = seen, plain
        return ""

    def _told(
        self, module: torch.nn.Module, before: dict[int, _Told] | None = None
    ) -> dict[str, _Told]:
        """What is told of the attributes of a module.

        Args:
            before: by their addresses, those of other modules that may change as they are; is
                added to.
        """
        told: dict[str, _Told] = {}
        replaced = self._forwards.get(module)  # as adapters do that are no modules of the model's
        for name, value in [*own_attributes(module), ("forward", replaced)]:
            if name in _NOTES or (name == "forward" and replaced is None):
                continue
            known = None if before is None else before.get(id(value))
            told[name] = one = known or self._told_of(value)
            if before is not None and not is_told_once(value):
                before[id(value)] = one
        return told

    def _told_of(self, value: Any) -> _Told:
        tensors: list[torch.Tensor] = []
        text = told_of(value, tensors, self._known)
        return _Told(value, text, tuple(tensors), _places(tensors))

    def _learn(self) -> None:
        self.device = self._tensors[0].device
        classes = {kind for one in self._modules() for kind in type(one).__mro__[:-1]}
        configs = {id(one): one for m in self._modules() if (one := vars(m).get("config"))}
        described = [
            environment(self.device, classes),
            self._plain,
            [str(one.to_dict()) for one in configs.values() if hasattr(one, "to_dict")],
        ]
        self.known = digest_of(json_bytes(described), self._weights[1])

    def _take_samples(self) -> None:
        whole = (one for one in self._tensors if one.numel() and one.is_contiguous())
        some = [one.detach().view(-1) for one in whole]
        self._samples = [one[:: -(-len(one) // _SAMPLES)] for one in some]
        self._sampled = self._taken()

    def _taken(self) -> list[torch.Tensor]:
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in self._samples:
            kinds.setdefault(one.dtype, []).append(one)
        return [torch.cat(of_kind) for of_kind in kinds.values()]

    def _has_samples(self) -> bool:
        now = self._taken()
        return len(now) == len(self._sampled) and all(map(_same_bits, now, self._sampled))


def _tensors_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """Its own weights and buffers."""
    found = (*module._parameters.values(), *module._buffers.values())
    return [one for one in found if one is not None]


def _inside(attributes: dict[str, Any]) -> tuple[Any, ...]:
    modules, parameters, buffers = (attributes[name] for name in _INSIDE)
    return (*modules.values(), *parameters.values(), *buffers.values())


def _are_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether these are the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _values(module: torch.nn.Module) -> tuple[Any, ...]:
    """Its class, and names and values of its attributes."""
    attributes = vars(module)
    return (type(module), *attributes, *attributes.values())


def _places(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Where they are, and how often each was changed in place."""
    return tuple((one.data_ptr(), version_of(one)) for one in tensors)


def _has_listeners(attributes: dict[str, Any]) -> bool:
    """Whether a hook on an inner module may miss a call."""
    if not any(map(attributes.__getitem__, _HOOKS)):
        return False
    return any(_listens(one) for kind in _HOOKS for one in attributes[kind].values())


def _listens(hook: Any) -> bool:
    if isinstance(hook, Hook):
        return False
    if getattr(hook, "__module__", "") != _CAPTURES:
        return True
    # It is there for good once a call has asked for it, and collects where a call asks.
    from transformers.utils.output_capturing import _active_collector

    collected = _active_collector.get()
    inner = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return collected is not None and ("key" not in inner or inner["key"].cell_contents in collected)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
