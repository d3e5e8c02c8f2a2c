# SPDX-License-Identifier: Apache-2.0
"""What a frozen part's modules are, as they were last looked at: `FrozenState`.

Weights, buffers, settings and hooks decide what comes out of a part as its arguments do, so each
pass looks at all of them before it looks for a stored result.

Note [A second look]
Hundreds of modules are looked at in each pass, in the thread that launches operations. So a look
notes, of each module, its class, the names and values of its attributes, and what its dicts of
modules, parameters and buffers hold. Where the next one finds the same objects, all that was told
of them holds. Lists, which may change while they stay the same object, are compared by value, and
so is what the configuration says of attention.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.frozen.digests import digest_of, environment, json_bytes, tensors_digest
from megatron.offload.frozen.structure import UNTOLD, told_of
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


class _Seen(NamedTuple):
    """A module at the last look; see Note [A second look].

    Attributes:
        module: itself.
        is_inner: it is not called where the part is skipped.
        values: its class, and names and values of its attributes.
        inside: what its dicts of modules, parameters and buffers hold.
        listed: what its attributes add to the key, if a list is among them; else None.
    """

    module: torch.nn.Module
    is_inner: bool
    values: tuple[Any, ...]
    inside: tuple[Any, ...]
    listed: list[Any] | None


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
        self._attentions: list[tuple[Any, Any]] = []  # configurations, and what they say
        self._tensors: list[torch.Tensor] = []  # weights and buffers
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
        return is_same and _places(self._tensors) == self.value[0] and self._has_samples()

    def _modules(self) -> Iterator[torch.nn.Module]:
        for one in self._outer:
            yield from one.modules()

    def _is_as_seen(self) -> bool:
        """Whether a look at all modules would find what the last one found."""
        for module, is_inner, values, inside, listed in self._seen:
            attributes = vars(module)
            if not _are_same((type(module), *attributes, *attributes.values()), values):
                return False
            if not _are_same(_inside(attributes), inside):
                return False
            if listed is not None and _told(attributes) != listed:
                return False
            if is_inner and _has_listeners(attributes):
                return False
        return bool(self._seen) and all(_attention(one) == said for one, said in self._attentions)

    def _look_at_all(self) -> str:
        """Looks at each module anew; returns why nothing may be stored, or nothing."""
        self._seen = []
        seen: list[_Seen] = []
        plain: list[Any] = []
        configs: dict[int, Any] = {}
        outer = {*self._outer}
        for module in self._modules():
            attributes = vars(module)
            is_inner = module not in outer
            if is_inner and (
                attributes.get("forward") is not self._forwards.get(module, self)
                or _has_listeners(attributes)
            ):
                return f"an inner {type(module).__name__} has hooks, or another forward"
            told = _told(attributes)
            config = attributes.get("config")
            plain += [type(module).__qualname__, told, _attention(config)]
            configs[id(config)] = config
            has_list = list in map(type, attributes.values())  # whose elements may change
            values = (type(module), *attributes, *attributes.values())
            listed = told if has_list else None
            seen.append(_Seen(module, is_inner, values, _inside(attributes), listed))
        self._tensors = [one for module in self._modules() for one in _tensors_in(module)]
        self._attentions = [(one, _attention(one)) for one in configs.values()]
        self._seen, self._plain = seen, plain
        return ""

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


def _told(attributes: dict[str, Any]) -> list[Any]:
    """What the attributes of a module add to its key."""
    return [
        (name, found)
        for name, value in attributes.items()
        if name not in _NOTES and (found := told_of(value)) is not UNTOLD
    ]


def _attention(config: Any) -> Any:
    return getattr(config, "_attn_implementation", None)


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
