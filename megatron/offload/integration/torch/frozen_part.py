# SPDX-License-Identifier: Apache-2.0
"""A part of a model without trainable weights, and its stored results: `FrozenPart`.

It takes the place of the `forward` of its modules, which the model calls one after another. Each
pass goes one of three ways: its rows are there, and the modules are skipped; they compute, and the
result is stored; or they compute and nothing is stored, because something wants a gradient, trains,
listens to an inner module, or cannot be told apart. `frozen_pass.py` has what is told of a pass.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.activations.saved.quantization import Quantization
from megatron.offload.errors import FEATURES_PREFIX, ConfigurationError
from megatron.offload.frozen.digests import (
    digest_of,
    environment,
    json_bytes,
    switches,
    tensors_digest,
)
from megatron.offload.frozen.store import FeatureStore
from megatron.offload.frozen.structure import UNTOLD, UnknownValueError, told_of
from megatron.offload.integration.hook import Hook
from megatron.offload.integration.open_parameters import unit_of
from megatron.offload.integration.torch.frozen_pass import FrozenPass, version_of

logger = logging.getLogger(__name__)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Attributes by which transformers remembers what it has done with a module.
_NOTES = ("_output_capturing_hooks_installed", "_is_hf_initialized")
_CAPTURES = "transformers.utils.output_capturing"
# Each kind of call is tried out once, which costs a pass. Where each batch is of another kind, some
# are left to later epochs.
_TRIALS, _PASSES_A_TRIAL = 2, 32  # so many at once, and then one in so many passes
_SAMPLES = 8  # elements of each weight that are compared in each pass


class _Call:
    """One module of a part."""

    def __init__(self, part: FrozenPart, index: int, module: torch.nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] = module.forward
        self._part, self._index = part, index

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        return self._part.call(self._index, args, kwargs)


class FrozenPart:
    """Modules without trainable weights that run one after another.

    Args:
        modules: by their names.
        store: where results go.
        asks: whether a trainer has inputs ask for gradients that nothing needs; see
            `frozen_modules.ask_for_gradients`.
        codec: of what is stored; None: it is exact.

    Attributes:
        name: of the modules, in sentences.
        calls: what takes the place of each module's `forward`.
        state: of the weights, at the last look.
        hit_rows: whose results were there; of a call that is stored as a whole, all its rows.
        computed_rows: whose results were not.
        why_not: the last reason for which a pass was neither.
        used: gets the keys of each pass, row by row; None: they are not asked for.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, torch.nn.Module]],
        store: FeatureStore,
        asks: Callable[[], bool],
        codec: Quantization | None = None,
    ) -> None:
        names = [name or type(module).__name__ for name, module in modules]
        self.name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self.calls = [_Call(self, index, one) for index, (_, one) in enumerate(modules)]
        self.num_modules = len(self.calls)
        self._store, self._asks, self.codec = store, asks, codec
        self._pass: FrozenPass | None = None
        self._keys: list[bytes] = []  # of the pass
        self._is_trial = False  # whether its kind is being tried out
        self.state: tuple[Any, ...] = ()
        self._known = b""  # digest of the state
        self._weights: tuple[Any, bytes] = ((), b"")  # places of tensors, and their digest
        # Names and values of a module's attributes at the last look, and what they add to a key.
        self._attributes: dict[torch.nn.Module, tuple[Sequence[Any], list[Any]]] = {}
        self._samples: list[torch.Tensor] = []  # some elements of each weight, in place
        self._sampled: list[torch.Tensor] = []  # and as they were
        self._kinds: dict[bytes, bool | None] = {}  # of calls: whether rows are apart
        self._num_trials = self._num_passes = 0
        self._said: set[str] = set()
        self._is_off = False
        self.hit_rows = self.computed_rows = 0
        self.why_not = ""
        self.used: list[list[bytes]] | None = None
        inner = list(self._inner())
        self._forwards = {one: vars(one).get("forward") for one in inner}
        found = (getattr(one, "layer_idx", None) for one in self._modules())
        self.cache_layers = sorted({one for one in found if isinstance(one, int)})

    def own(self, index: int) -> Callable[..., Any]:
        """The `forward` of a module."""
        return self.calls[index].own

    def leave(self, one: FrozenPass) -> None:
        """A pass is skipped no further."""
        if self._pass is one:
            self._pass = None

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model gets of a module."""
        if not index:
            self._pass = None
            wanting = _wanting(args, kwargs)
            if any(one.grad_fn is not None for one in wanting) or (wanting and not self._asks()):
                # Its inputs are computed of trainable weights, and differ in evaluation too.
                self._is_off = True
                self._say("its inputs want gradients")
            if not self._is_off:
                return self._begin(args, kwargs, wants_gradient=bool(wanting))
        current = self._pass
        if current is None or not current.is_here or current.following != index:
            self._pass = None
            return self._compute(index, args, kwargs)
        if not all(map(current.may_want, _wanting(args, kwargs))):
            self._pass = None
            self._say("its modules get tensors that want gradients")
            return self._compute(index, args, kwargs)
        is_skipped = current.is_skipped
        try:
            is_linked = current.given(index, args, kwargs)
        except UnknownValueError as error:
            self._pass = None
            self._say(f"its modules get a {error}, whose contents cannot be told")
            return self._compute(index, args, kwargs)
        if not is_linked and not is_skipped:
            self._pass = None
            self._say("its modules do not get what the one before returned")
            return self._compute(index, args, kwargs)
        if is_skipped:
            return self._go_on_skipping(current, index, args, kwargs, is_linked=is_linked)
        return self._store_result(current, index, self._compute(index, args, kwargs))

    def is_as_in(self, state: tuple[Any, ...]) -> bool:
        """Whether the weights are those of then."""
        return self._look() == "" and self.state == state

    # -- The three ways ----------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, wants_gradient: bool) -> Any:
        self.why_not = self._look()
        if self.why_not:
            return self._compute(0, args, kwargs)
        try:
            rounds = [] if self.codec is None else [repr(self.codec)]
            known = digest_of(self._known, json_bytes([*switches(self._device), *rounds]))
            current = FrozenPass(self, args, kwargs, known)
        except UnknownValueError as error:
            self._say(f"its call has a {error}, whose contents cannot be told")
            return self._compute(0, args, kwargs)
        current.wants_gradient = wants_gradient
        by_rows = self._has_rows_apart(current)
        self._num_passes += 1
        may_try = self._num_trials < _TRIALS + self._num_passes // _PASSES_A_TRIAL
        if by_rows is None and not may_try:
            self.computed_rows += current.num_places
            return self._compute(0, args, kwargs)
        keys = current.keys(by_rows=by_rows is not False)
        self._keys, self._is_trial = keys, by_rows is None
        entries = self._store.read(keys) if by_rows is not None else None
        if entries is not None and current.skip(entries, args, kwargs):
            self._pass = current
            return self._go_on_skipping(current, 0, args, kwargs, is_linked=True)
        if by_rows is None:
            self._num_trials += 1
            current.keep(args, kwargs)
        self._pass = current
        return self._store_result(current, 0, self._compute(0, args, kwargs))

    def _go_on_skipping(
        self,
        current: FrozenPass,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_linked: bool,
    ) -> Any:
        if self._pass is not current:  # a use of its values has had them computed
            self.computed_rows += current.num_places
            return self._compute(index, args, kwargs)
        if is_linked and index + 1 < self.num_modules:
            return current.stand_in(index)
        self._pass = None
        found = current.stored_result() if is_linked else None
        if found is None:
            self.computed_rows += current.num_places
            current.compute()  # this module too: its arguments are kept
            return current.result
        self.hit_rows += current.num_places
        self._note_keys()
        return found[0]

    def _store_result(self, current: FrozenPass, index: int, result: Any) -> Any:
        try:
            leaves = current.returned(index, result)
            if index + 1 < self.num_modules:
                return result
            self._pass = None
            self.computed_rows += current.num_places
            if _places(self._tensors()) != self.state[0] or not self._has_samples():
                self._refuse(
                    "changes its own weights or buffers while it computes, as batch norms do in "
                    "training; call eval() on it before each pass"
                )
            is_stored = not self._is_trial or self._are_apart(current, leaves)
            header, rows = current.rows_of(leaves)
            result = result if self.codec is None else current.of_rows(rows)
        except UnknownValueError as error:
            self._pass = None
            self._is_off = True
            self._say(f"it returns a {error}, which cannot be stored")
            return result
        if is_stored:
            for key, row, rest in zip(self._keys, rows, current.rest, strict=True):
                self._store.begin_write(key, header | {"rest": rest}, row)
            self._note_keys()
        return result

    def _are_apart(self, current: FrozenPass, leaves: list[torch.Tensor]) -> bool:
        """Tries out whether the rows of this kind of call are apart; see Note [Rows]."""
        is_apart = current.has_rows_apart(leaves)
        self._kinds[current.base] = is_apart
        key = digest_of(current.base, b"rows")
        self._store.begin_write(key, {"apart": is_apart}, [])
        if not is_apart:
            current.keys(by_rows=False)  # a codec rounds it as it will when it is stored
            self._say(
                "a row's result is not the same whatever rows stand beside it, so a call is stored "
                "as a whole, and is found if the same rows come together again",
                is_computed=False,
            )
        return is_apart

    def _note_keys(self) -> None:
        if self.used is not None:
            self.used.append(self._keys)

    def _has_rows_apart(self, current: FrozenPass) -> bool | None:
        """Of this kind of call; None: it was not tried out. See Note [Rows]."""
        if current.num_places == 1:
            return False
        if self._kinds.get(current.base) is None:
            entries = self._store.read([digest_of(current.base, b"rows")])
            if entries is None:
                return None
            self._kinds[current.base] = entries[0].header.get("apart") is True
        return self._kinds[current.base]

    def _compute(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module.

        Raises:
            ConfigurationError: a result that was to be stored was made with random numbers.
        """
        if self._pass is None:
            return self.calls[index].own(*args, **kwargs)
        before = self._random_state()
        result = self.calls[index].own(*args, **kwargs)
        if not all(map(torch.equal, before, self._random_state())):
            self._refuse(
                "draws random numbers (dropout?), so what it computes is never the same; set its "
                "dropout to 0, or call eval() on it before each pass"
            )
        return result

    def _random_state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    # -- The modules, as they are now --------------------------------------------------------------

    def _modules(self) -> Iterator[torch.nn.Module]:
        for call in self.calls:
            yield from call.module.modules()

    def _inner(self) -> Iterator[torch.nn.Module]:
        """Those that are not called where the part is skipped."""
        outer = {call.module for call in self.calls}
        return (one for one in self._modules() if one not in outer)

    def _look(self) -> str:
        """Looks at all modules, weights and buffers; returns why nothing may be stored, or nothing.

        A weight that is changed in place through `.data`, which torch does not count, is found by
        some of its elements.
        """
        tensors: list[torch.Tensor] = []
        plain: list[Any] = []
        outer = {call.module for call in self.calls}
        for module in self._modules():
            for one in module._parameters.values():
                if one is not None:
                    if one.requires_grad:
                        return "a weight in it is trained"
                    if unit_of(one) >= 0:
                        return "a weight in it is offloaded"
                    tensors.append(one)
            tensors += [one for one in module._buffers.values() if one is not None]
            of_module = vars(module)
            plain.append(type(module).__qualname__)
            plain.append(self._told_of(module, of_module))
            plain.append(getattr(of_module.get("config"), "_attn_implementation", None))
            if module not in outer and (
                of_module.get("forward") is not self._forwards.get(module, self)
                or any(map(_listens, (one for kind in _HOOKS for one in of_module[kind].values())))
            ):
                return f"an inner {type(module).__name__} has hooks, or another forward"
        torch_modules: Any = torch.nn.modules.module
        if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
            return "all modules have hooks"
        places = _places(tensors)
        state = (places, plain)
        has_samples = self._has_samples()
        if state != self.state or not has_samples:
            if places != self._weights[0] or not has_samples:
                self._weights = (places, tensors_digest(tensors))
                self._take_samples(tensors)
            self._learn(tensors[0].device, plain)
            self.state = state
        return ""

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All weights and buffers, in the order of a look."""
        for module in self._modules():
            for of_kind in (module._parameters, module._buffers):
                yield from (one for one in of_kind.values() if one is not None)

    def _told_of(self, module: torch.nn.Module, of_module: dict[str, Any]) -> list[Any]:
        """What the attributes of a module add to its key; mostly the same as at the last look."""
        seen = self._attributes.get(module)
        if seen is not None:
            now = (*of_module, *of_module.values())
            if len(now) == len(seen[0]) and all(map(operator.is_, now, seen[0])):
                return seen[1]
        told = [
            (name, found)
            for name, value in of_module.items()
            if name not in _NOTES and (found := told_of(value)) is not UNTOLD
        ]
        if list not in map(type, of_module.values()):  # whose elements may change
            self._attributes[module] = (*of_module, *of_module.values()), told
        return told

    def _learn(self, device: torch.device, plain: list[Any]) -> None:
        self._device = device
        classes = {kind for one in self._modules() for kind in type(one).__mro__[:-1]}
        configs = {id(one): one for m in self._modules() if (one := vars(m).get("config"))}
        described = [
            environment(device, classes),
            plain,
            [str(one.to_dict()) for one in configs.values() if hasattr(one, "to_dict")],
        ]
        self._known = digest_of(json_bytes(described), self._weights[1])

    def _take_samples(self, tensors: Sequence[torch.Tensor]) -> None:
        some = [one.detach().view(-1) for one in tensors if one.numel() and one.is_contiguous()]
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

    # -- Sentences ---------------------------------------------------------------------------------

    def _say(self, why: str, *, is_computed: bool = True) -> None:
        if is_computed:
            self.why_not = why
        if why not in self._said:
            self._said.add(why)
            begin = " is computed and not stored: " if is_computed else ": "
            logger.warning("%s%s%s%s", FEATURES_PREFIX, self.name, begin, why)

    def _refuse(self, why: str) -> NoReturn:
        self._pass, self._is_off = None, True
        raise ConfigurationError(f"{FEATURES_PREFIX}{self.name} {why}; or leave out the cache")


def _places(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Where they are, and how often each was changed in place."""
    return tuple((one.data_ptr(), version_of(one)) for one in tensors)


def _wanting(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that want gradients now."""
    if not torch.is_grad_enabled():
        return []
    found = (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
    return [one for one in found if one.requires_grad]


def _listens(hook: Any) -> bool:
    """Whether a hook on an inner module may miss a call."""
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
