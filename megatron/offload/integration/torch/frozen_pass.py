# SPDX-License-Identifier: Apache-2.0
"""One pass through a frozen part: `FrozenPass`, which tells its inputs apart and skips it.

`FrozenPart` makes one when the part's first module is called. A pass that finds its rows skips all
modules and returns the stored result for the last one; else they compute, and it stores the result.

Note [What a key holds]
Between the first module and the last one only these modules compute, so what goes into them decides
what comes out: the arguments of the first module, which the key holds with the weights and all
else that changes bits, and those of later modules, which are not known when the first is called.
Their digest (`rest`) is in the file, and is compared when the last module is called. A tensor that
an earlier module of the part returned, and that was not changed since, needs no digest.

Note [Rows]
A row is an index of the first dimension. A row of the result is stored by itself if it has the same
bits whatever stands beside it and wherever it is: the first time that a kind of call is computed it
is computed once more, with one row in all places. Its number of rows, its shapes and strides are in
the key: other shapes take other kernels, and round otherwise. Where rows depend on each other, a
call is stored as a whole. An argument whose second dimension is as large as the batch is never
taken apart, but for the first one, which the trial decides: it may be a mask for all rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from megatron.offload.activations.saved.quantization import Quantization
from megatron.offload.errors import FEATURES_PREFIX, OffloadError
from megatron.offload.frozen.digests import (
    bytes_of,
    digest_of,
    framed,
    json_bytes,
    layout_of,
    masks_nothing,
    row_digests,
)
from megatron.offload.frozen.entry import Entry
from megatron.offload.frozen.rows import Rows, parsed
from megatron.offload.frozen.structure import UnknownValueError, flatten, unflatten
from megatron.offload.integration.torch.frozen_calls import (
    LaterCalls,
    Made,
    as_it_is,
    repeated,
    share_memory,
    version_of,
)
from megatron.offload.integration.torch.skipped import UnfilledLayer, computed_in, skipped

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Modules(Protocol):
    """The modules of a part, which a pass goes through one after another.

    Attributes:
        name: for people.
        num_modules: so many.
        state: of their weights and settings, as they were last looked at.
        cache_layers: numbers of the layers of a cache of keys and values that they fill.
        codec: of what is stored; None: it is exact.
    """

    name: str
    num_modules: int
    cache_layers: list[int]
    codec: Quantization | None

    @property
    def state(self) -> tuple[Any, ...]: ...

    def own(self, index: int) -> Callable[..., Any]:
        """The `forward` of a module."""
        ...

    def leave(self, one: FrozenPass) -> None:
        """A pass is skipped no further."""
        ...

    def is_as_in(self, state: tuple[Any, ...]) -> bool:
        """Whether the weights are those of then."""
        ...


class FrozenPass:
    """What one pass gave the modules of a part, and what they made of it.

    Args:
        part: whose first module is called.
        args: of that call.
        kwargs: of that call.
        known: what the key holds beside arguments.

    Attributes:
        base: digest of all but the values of tensors.
        num_places: the size of the first dimension; 1 where there is none.
        following: the number of the module that is to be called next.
        made: what the modules returned, or the last of them.
        kept: arguments of the modules so far, if they may be computed again.
        result: of the last module that was computed after all.
        is_skipped: whether its rows were there.
        wants_gradient: whether a trainer has the input ask for a gradient, so that the result does.

    Raises:
        UnknownValueError: an argument's contents cannot be told.
    """

    def __init__(
        self, part: Modules, args: tuple[Any, ...], kwargs: dict[str, Any], known: bytes
    ) -> None:
        self._part = part
        self._thread = threading.get_ident()
        self._cache: Any = None  # of keys and values, that the modules fill
        self._unfilled: dict[int, UnfilledLayer] = {}
        self.made: Made = {}
        self._later = LaterCalls(self.made)
        self._digests: dict[tuple[int, bool, int], tuple[torch.Tensor, int, list[bytes]]] = {}
        self.following = 1
        self.kept: list[_Arguments] | None = None
        self._as_kept: list[tuple[torch.Tensor, int]] = []  # tensors in them, and their versions
        self.result: Any = None
        self._values: list[list[torch.Tensor]] | None = None  # of skipped modules, once computed
        self._entries: list[Entry] = []
        self.is_skipped = self.wants_gradient = False
        self._state = part.state
        spec, self._leaves = self._described(args, kwargs)
        self.num_places = next((len(one) for one in self._leaves if one.dim() > 1), 1)
        self._first = first = next((one for one in self._leaves if one.dim() > 1), None)
        self.device = first.device if first is not None else torch.device("cpu")
        kind = self.device.type
        self._autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        if first is not None and not self._has_rows(first):
            self.num_places = 1
        layouts = [
            [*layout_of(one), one.requires_grad, self._has_rows(one), masks_nothing(one)]
            for one in self._leaves
        ]
        self.base = digest_of(known, json_bytes([spec, layouts]))
        self._by_rows = False
        self._specs: list[Any] = []  # of results

    @property
    def is_here(self) -> bool:
        """Whether this thread runs the pass."""
        return threading.get_ident() == self._thread

    @property
    def num_rows(self) -> int:
        """Files of a result."""
        return self.num_places if self._by_rows else 1

    @property
    def is_as_kept(self) -> bool:
        """Whether the tensors that modules were given are as they were, to be given again."""
        return all(version == version_of(one) for one, version in self._as_kept)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the arguments of the first module, and from now on those of later ones."""
        self.kept = []
        self._keep(args, kwargs, self._leaves)

    def keys(self, *, by_rows: bool) -> list[bytes]:
        """Of the files that a result of this pass has, one for each row, or one for all."""
        self._by_rows = by_rows
        self._later.clear()
        each = zip(*(self._digests_of(one) for one in self._leaves), strict=True)
        found = [digest_of(self.base, *digests) for digests in each]
        return found or [digest_of(self.base)]

    # -- A pass that is computed -------------------------------------------------------------------

    def returned(self, index: int, result: Any) -> list[torch.Tensor]:
        """A module has computed its result; returns the tensors in it.

        Raises:
            UnknownValueError: something else than tensors and numbers is in it.
        """
        leaves: list[torch.Tensor] = []
        spec = flatten(result, leaves)
        if self.kept is None:
            self.made.clear()  # which would keep the results of all modules in memory
        self._specs.append({"spec": spec, "tensors": [layout_of(one) for one in leaves]})
        if index + 1 == self._part.num_modules and share_memory(leaves, self._leaves):
            raise UnknownValueError("part of its input")  # which may be changed there
        for number, one in enumerate(leaves):
            self.made[id(one)] = (one, version_of(one), [index, number])
        return leaves

    def may_want(self, tensor: torch.Tensor) -> bool:
        """Whether an argument wants a gradient only because the first input does."""
        return id(tensor) in self.made or tensor is self._first

    def given(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A later module is called; False: not with what the one before returned.

        Raises:
            UnknownValueError: an argument's contents cannot be told.
        """
        spec, leaves = self._described(args, kwargs)
        text = json_bytes([spec, [layout_of(one) for one in leaves]])
        each = [self._digests_of(one) for one in leaves]
        digests = [framed(*(one[row] for one in each)) for row in range(self.num_rows)]
        is_linked = self._later.note(index, args, kwargs, (text, leaves, digests))
        self._go_on(args, kwargs, leaves)
        return is_linked

    def given_again(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """`given` for a call as that of the module before; False: it is another, and not noted."""
        leaves = self._later.note_again(index, args, kwargs)
        if leaves is None:
            return False
        self._go_on(args, kwargs, leaves)
        return True

    def _go_on(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[torch.Tensor]
    ) -> None:
        if self.kept is not None:
            self._keep(args, kwargs, leaves)
        self.following += 1

    def rows_of(self, leaves: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[list[bytes]]]:
        """What the files of the result have in common, and the bytes of each.

        Raises:
            UnknownValueError: the result cannot be stored.
        """
        for one in leaves:
            if any(map(_is_repeated, one.shape, one.stride())):
                raise UnknownValueError("tensor whose elements share memory")
        return {"results": self._specs}, self._rows.encode(leaves)

    def of_rows(self, rows: Sequence[Sequence[bytes]]) -> Any:
        """The result of the last module, of its bytes: see Note [Rounded wherever they come from].

        Args:
            rows: from `rows_of`.
        """
        return self._result([bytearray().join(row) for row in rows])

    def _result(self, payloads: Sequence[memoryview | bytearray]) -> Any:
        leaves = self._rows.decode(payloads, self.device)
        for one in leaves if self.wants_gradient else ():
            one.requires_grad_(one.is_floating_point())
        return unflatten(self._specs[-1]["spec"], leaves)

    @property
    def _rows(self) -> Rows:
        return Rows(self._specs[-1]["tensors"], self.num_rows, self._part.codec)

    @property
    def rest(self) -> list[str]:
        """The digest of later arguments, for each row."""
        return [one.hex() for one in self._later.digests(self.num_rows)]

    def has_rows_apart(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether rows have these bits whatever stands beside them; see Note [Rows].

        Computes all modules once more.

        Args:
            leaves: tensors of the result.
        """
        assert self.kept is not None
        if not all(one.dim() and len(one) == self.num_places for one in leaves):
            return False
        values: list[list[torch.Tensor]] = []
        row = self.num_places - 1

        def chosen(value: Any) -> Any:
            if value is self._cache:
                return None
            if not isinstance(value, torch.Tensor):
                return value
            made = self.made.get(id(value))
            if made is not None and made[2][0] < index:
                module, leaf = made[2]
                return values[module][leaf]
            return repeated(value, row) if self._has_rows(value) else value

        first = set(map(id, self._leaves))
        for index, (args, kwargs) in enumerate(self.kept):
            # What a later module hands on, of an earlier one, would be that of other rows.
            made = (
                self.made[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self.made
            )
            if any(place[0] >= index and id(one) not in first for one, _, place in made):
                return False
            args, kwargs = tree_map(chosen, (args, kwargs), is_leaf=lambda one: one is self._cache)
            found: list[torch.Tensor] = []
            flatten(self._part.own(index)(*args, **kwargs), found)
            values.append(found)
        if len(values[-1]) != len(leaves):
            return False
        for one, other in zip(leaves, values[-1], strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            wanted, got = bytes_of(one[row]), bytes_of(other)
            if bytes(got) != bytes(wanted) * self.num_places:
                return False
        return True

    # -- A pass that is skipped --------------------------------------------------------------------

    def skip(self, entries: list[Entry], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Its rows are there; False: they are of another kind."""
        results = entries[0].header.get("results")
        if not isinstance(results, list) or len(results) != self._part.num_modules:
            return False
        if any(one.header.get("results") != results for one in entries[1:]):
            return False
        self._specs = results
        if any(one.num_bytes != self._rows.num_bytes for one in entries):
            self._specs = []
            return False
        self._entries, self.is_skipped = entries, True
        self.keep(args, kwargs)
        return True

    def stand_in(self, index: int) -> Any:
        """What a skipped module returns, but for the last one."""
        leaves: list[torch.Tensor] = []
        for number, layout in enumerate(self._specs[index]["tensors"]):
            one = skipped(self, index, number, parsed(layout, self.device))
            self.made[id(one)] = (one, 0, [index, number])
            leaves.append(one)
        return unflatten(self._specs[index]["spec"], leaves)

    def stored_result(self) -> Any:
        """What the last module would return; None: later arguments are not those of the file."""
        if self._values is not None or self.rest != [one.header["rest"] for one in self._entries]:
            return None
        result = self._result([entry.payload for entry in self._entries])
        self._entries = []
        if self._cache is not None:
            self._leave_unfilled()
        return (result,)

    def computed(self, module: int, leaf: int) -> torch.Tensor:
        """A tensor that was skipped."""
        self.compute()
        assert self._values is not None
        return self._values[module][leaf]

    def compute(self) -> None:
        """Computes the modules that were skipped so far; the rest of the pass is not skipped.

        Raises:
            OffloadError: their weights have changed since.
        """
        if self._values is not None:
            return
        self._part.leave(self)
        if not self.is_as_kept or not self._part.is_as_in(self._state):
            raise OffloadError(
                f"{FEATURES_PREFIX}{self._part.name} was skipped, and its weights or its input "
                "have changed before a value in its middle was used (a hidden state, a cache of "
                "keys and values); use it before, or close() the handle"
            )
        self._values = []
        for index, one in self._unfilled.items():
            self._cache.layers[index] = vars(one)["_layer"]
        kind, enabled, dtype = self._autocast
        with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
            for index, (args, kwargs) in enumerate(self.kept or ()):
                found: list[torch.Tensor] = []
                args, kwargs = computed_in((args, kwargs))
                self.result = self._part.own(index)(*args, **kwargs)
                flatten(self.result, found)
                self._values.append(found)
        self.kept, self._as_kept = None, []

    def _keep(self, args: Any, kwargs: Any, leaves: Sequence[torch.Tensor]) -> None:
        assert self.kept is not None
        self.kept.append((as_it_is(args), as_it_is(kwargs)))
        self._as_kept += [(one, version_of(one)) for one in leaves]

    def _leave_unfilled(self) -> None:
        layers = self._cache.layers
        for index in self._part.cache_layers:
            while len(layers) <= index:
                layers.append(self._cache.layer_class_to_replicate())
            layers[index] = self._unfilled[index] = UnfilledLayer(self, layers[index])

    # -- Arguments ---------------------------------------------------------------------------------

    def _described(self, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        leaves: list[torch.Tensor] = []
        return flatten([args, kwargs], leaves, self._special), leaves

    def _special(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = self.made.get(id(value))
            if made is None or made[0] is not value or made[1] != version_of(value):
                return None
            return {"made": made[2]} if made[2][0] == self.following - 1 else None
        if value is not None and value is self._cache:
            return {"cache": True}
        if is_plain_cache(value):
            if self._cache is not None or self.following > 1:
                raise UnknownValueError("second cache of keys and values")
            self._cache = value
            return {"cache": _of_cache(value)}
        return None

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        """Whether its first dimension is that of the batch; see Note [Rows]."""
        if not tensor.dim() or len(tensor) != self.num_places:
            return False
        is_clear = tensor.dim() == 1 or tensor.shape[1] != self.num_places
        return is_clear or (tensor is self._first and tensor.dim() > 2)

    def _digests_of(self, tensor: torch.Tensor) -> list[bytes]:
        by_rows = self._by_rows and self._has_rows(tensor)
        at = id(tensor), by_rows, self.num_rows
        known = self._digests.get(at)
        if known is None or known[1] != version_of(tensor) or known[1] < 0:
            values = row_digests(tensor, self.num_rows, by_rows=by_rows)
            known = self._digests[at] = (tensor, version_of(tensor), values)
        return known[2]


def is_plain_cache(value: Any) -> bool:
    """Whether it is transformers' cache of keys and values that grows."""
    kind = type(value)
    return kind.__name__ == "DynamicCache" and kind.__module__.startswith("transformers.")


def _of_cache(cache: Any) -> Any:
    """What an empty cache is made of. Raises UnknownValueError: it is not empty."""
    layers = cache.layers
    if getattr(cache, "offloading", False) or any(one.is_initialized for one in layers):
        raise UnknownValueError("cache that has keys and values already")
    plain = (bool, int, float, str)
    return [
        [type(one).__name__, {name: x for name, x in vars(one).items() if type(x) in plain}]
        for one in layers
    ]


def _is_repeated(size: int, step: int) -> bool:
    """Whether elements of a dimension are the same memory."""
    return size > 1 and not step
