# SPDX-License-Identifier: Apache-2.0
"""A part of a model without trainable weights, and its stored results: `FrozenPart`.

It takes the place of the `forward` of its modules, which the model calls one after another. Each
pass goes one of three ways: its rows are there, and the modules are skipped; they compute, and the
result is stored; or they compute and nothing is stored, because something wants a gradient, trains,
listens to an inner module, or cannot be told apart. `frozen_pass.py` has what is told of a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.activations.saved.autograd_graph import nodes_behind
from megatron.offload.activations.saved.quantization import Quantization
from megatron.offload.errors import FEATURES_PREFIX, ConfigurationError
from megatron.offload.frozen.digests import digest_of, json_bytes, switches
from megatron.offload.frozen.store import FeatureStore
from megatron.offload.frozen.structure import UnknownValueError
from megatron.offload.integration.hook import outside_of_graphs
from megatron.offload.integration.torch.frozen_calls import CalledWith
from megatron.offload.integration.torch.frozen_pass import FrozenPass
from megatron.offload.integration.torch.frozen_state import FrozenState
from megatron.offload.layer_major.other_numbers import OtherNumbers
from megatron.offload.machine.transform import in_transform

logger = logging.getLogger(__name__)

# Each kind of call is tried out once, which costs a pass. Where each batch is of another kind, some
# are left to later epochs.
_TRIALS, _PASSES_A_TRIAL = 2, 32  # so many at once, and then one in so many passes


class _Call:
    """One module of a part."""

    def __init__(self, part: FrozenPart, index: int, module: torch.nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] = module.forward
        self._part, self._index = part, index

    @outside_of_graphs("what a frozen part gives is looked up", "leave it out, or cache_frozen")
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
        self._state = FrozenState([one for _, one in modules])
        self._kinds: dict[bytes, bool | None] = {}  # of calls: whether rows are apart
        self._num_trials = self._num_passes = 0
        self._said: set[str] = set()
        self._random: list[bytes] = []  # state of the generators as the pass began
        self._keeps_arguments = True  # the modules of the pass so far
        self._others = OtherNumbers([one for _, one in modules])  # than torch's
        self._others_of: Any = None  # state of the modules that have them
        # In which a pass drew no random numbers: then they are looked at once for all modules.
        self._quiet_state: Any = None
        self._is_off = False
        self.hit_rows = self.computed_rows = 0
        self.why_not = ""
        self.used: list[list[bytes]] | None = None
        inner = (one for _, module in modules for one in module.modules())
        found = (getattr(one, "layer_idx", None) for one in inner)
        self.cache_layers = sorted({one for one in found if isinstance(one, int)})

    @property
    def state(self) -> tuple[Any, ...]:
        """Of weights and settings, as they were last looked at."""
        return self._state.value

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
            if in_transform():  # whose tensors are not those of other passes
                return self._compute(0, args, kwargs)
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
        is_skipped = current.is_skipped
        is_linked = current.given_again(index, args, kwargs)
        if not is_linked:
            why = ""
            try:
                if not all(map(current.may_want, _wanting(args, kwargs))):
                    why = "its modules get tensors that want gradients"
                else:
                    is_linked = current.given(index, args, kwargs)
                    if not is_linked and not is_skipped:
                        why = "its modules do not get what the one before returned"
            except UnknownValueError as error:
                why = f"its modules get a {error}, whose contents cannot be told"
            if why:
                self._pass = None
                self._say(why)
                return self._compute(index, args, kwargs)
        if is_skipped:
            return self._go_on_skipping(current, index, args, kwargs, is_linked=is_linked)
        return self._store_result(current, index, self._compute(index, args, kwargs))

    def is_as_in(self, state: tuple[Any, ...]) -> bool:
        """Whether the weights are those of then."""
        return self._state.look() == "" and self.state == state

    # -- The three ways ----------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, wants_gradient: bool) -> Any:
        self.why_not = self._state.look()
        if self.why_not:
            return self._compute(0, args, kwargs)
        try:
            rounds = [] if self.codec is None else [repr(self.codec)]
            switched = switches(self._state.device)
            known = digest_of(self._state.known, json_bytes([*switched, *rounds]))
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
            is_quiet = self._quiet_state is self.state
            self._quiet_state = self.state if self._has_random_state() else None
            if is_quiet and self._quiet_state is None:
                return result  # who drew them is seen in the next pass
            if not self._state.has_same_tensors():
                self._refuse(
                    "changes its own weights or buffers while it computes, as batch norms do in "
                    "training; call eval() on it before each pass"
                )
            if attribute := self._state.changed_attribute():
                self._say(
                    f"its modules change their attribute {attribute} while they compute, and a "
                    "pass that is skipped would not"
                )
                return result
            if any(map(_is_trained, leaves)):
                self._is_off = True
                self._say("something else than its own weights is trained in it")
                return result
            if not self._keeps_arguments or (self._is_trial and not current.is_as_kept):
                self._say("its arguments change in place while it computes")
                return result
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
        is_quiet = self._quiet_state is self.state
        before = self._random_state() if not index or not is_quiet else []
        if not index:
            self._random, self._keeps_arguments = before, True
        called_with = CalledWith(args, kwargs, self._pass.made)
        result = self.calls[index].own(*args, **kwargs)
        self._keeps_arguments = self._keeps_arguments and called_with.is_unchanged
        if not is_quiet and not self._has_random_state(before):
            self._refuse(
                "draws random numbers (dropout?), so what it computes is never the same; set its "
                "dropout to 0, or call eval() on it before each pass"
            )
        return result

    def _has_random_state(self, before: list[bytes] | None = None) -> bool:
        """Whether no numbers were drawn since; None: since the pass began."""
        return (before or self._random) == self._random_state()

    def _random_state(self) -> list[bytes]:
        states = [torch.get_rng_state()]
        device = self._state.device
        if device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(device).get_rng_state(device))
        if self._others_of is not self.state:
            modules = (inner for one in self.calls for inner in one.module.modules())
            self._others, self._others_of = OtherNumbers(modules), self.state
        return [*(one.numpy().tobytes() for one in states), *self._others.states()]

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


def _is_trained(result: torch.Tensor) -> bool:
    """Whether a gradient of a result comes to a parameter, of a part whose weights are frozen.

    Trainers have inputs ask for gradients that nothing needs, and so do models (Wav2Vec2).
    """
    leaves = (getattr(node, "variable", None) for node in nodes_behind([result.grad_fn]))
    return any(isinstance(leaf, torch.nn.Parameter) for leaf in leaves)


def _wanting(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that want gradients now."""
    if not torch.is_grad_enabled():
        return []
    found = (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
    return [one for one in found if one.requires_grad]
