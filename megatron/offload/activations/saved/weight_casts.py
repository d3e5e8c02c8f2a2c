# SPDX-License-Identifier: Apache-2.0
"""Copies of weights in another type or on another device, which never move: `WeightCasts`.

The hooks ask it for each saved tensor. For such a copy autograd then holds the weight itself, which
is in memory anyway, and how to copy it again. It never does I/O.

Note [Casts of weights]
Autocast gives an operation a copy of its weight, and autograd saves the copy. We recognise it by
its place in the graph: it is the result of a cast of a leaf, or a view of one. When backward asks,
we cast again, from an alias of the weight: the alias has the bytes and the version counter that the
weight had at the save, also if a script gives the parameter other memory later. So the bits are the
same if the weight's bytes at the save were those at the cast. They were if the weight's version at
the save is that of the step's beginning and the cast was made since: in this forward pass, or in a
thread that has saved it before (autocast has one cache for all threads).

If a weight changes while a graph holds it, autograd raises. If the graph holds a cast of it,
autograd does not: the graph goes on with the old cast. So before an optimizer changes weights, we
make the casts of them that graphs still hold, and keep these. Any other change of the weight makes
the backward pass raise. A change through `data` is noticed by nothing, as everywhere in autograd.

We leave alone casts of weights that require no gradient (nothing in the graph links them to the
weight), casts of weights that get other memory with each gather (FSDP1, ZeRO 3; FSDP2's keep
theirs), and casts that a script makes outside of autocast.

Note [No weak references to parameters]
`torch.utils.swap_tensors` refuses a tensor that a weak reference exists of, and `Module.to`,
`load_state_dict` and parametrizations swap parameters that are of a subclass, or all of them
(`torch.__future__.set_swap_module_params_on_conversion`). So we know a parameter by its address and
by its storage, to which a weak reference does no harm. A parameter on a tier has no such storage.
We hold that parameter itself, until the next step begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megatron.offload.activations.saved.autograd_graph import node_of
from megatron.offload.activations.saved.cache import is_small_part
from megatron.offload.activations.saved.resident import changed_in_place
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.storage_reference import StorageReference
from megatron.offload.activations.saved.tensor_kind import kind_of, without_graph
from megatron.offload.activations.saved.view import witness_of
from megatron.offload.errors import ChangedInPlaceError
from megatron.offload.machine.autocast import autocast_depth

_CAST = "ToCopyBackward0"  # autograd's name of what `Tensor.to` does
_IS_PLAIN = "is_plain"  # an attribute of the classes that parameters on a tier have


class _Weight(NamedTuple):
    """A parameter as it was when the step began: Note [No weak references to parameters]."""

    version: int
    shape: torch.Size
    storage: StorageReference | None  # None: a hook of its layer reads the parameter from a tier
    away: torch.nn.Parameter | None  # the parameter, if it is on a tier


class WeightCasts:
    """Which saved tensors are casts of weights, and those that autograd holds.

    Args:
        device: where activations live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: dict[int, _Weight] = {}  # by the address of the parameter
        self._known: dict[int, StorageReference] = {}  # casts of this step, by storage
        self._held: weakref.WeakSet[WeightCast] = weakref.WeakSet()
        # Forward passes and optimizers may run in threads of their own; held for an assignment.
        self._lock = threading.Lock()

    def begin_step(self, tensors: Iterable[torch.Tensor]) -> None:
        """A step begins: notes the versions that the weights have now.

        Args:
            tensors: with the parameters among them.
        """
        self._weights = {}
        self._known = {}
        with torch._C.DisableTorchFunctionSubclass():  # else an offloaded parameter is read back
            for one in tensors:
                if not isinstance(one, torch.nn.Parameter) or not one.requires_grad:
                    continue
                kind = kind_of(one)
                if not kind.is_all_bytes or kind.is_inference:
                    continue
                storage, away = None, None
                if not is_away(one):
                    storage = StorageReference(one.untyped_storage())
                elif hasattr(one, _IS_PLAIN):
                    away = one
                else:  # a subclass of others, whose casts `find` leaves alone
                    continue
                self._weights[id(one)] = _Weight(one._version, one.shape, storage, away)

    def find(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, since: int, scope: Scope
    ) -> WeightCast | None:
        """What autograd keeps instead of a cast of a weight; None: the tensor is no such cast.

        Args:
            tensor: that is saved.
            storage: its storage, which can move.
            since: number of the first operation of this thread in this step.
            scope: that saves it.
        """
        # What tells most tensors apart comes first: only few are the result of a cast.
        base = tensor._base
        cast = tensor if base is None else base
        node: Any = node_of(cast)
        if node is None or type(node).__name__ != _CAST:
            return None
        param: Any = getattr(node.next_functions[0][0], "variable", None)  # of its accumulator
        weight = self._weights.get(id(param))
        if weight is None:
            return None
        if weight.away is not None and not (weight.away is param and hasattr(param, _IS_PLAIN)):
            return None
        if cast.device == param.device and not (
            autocast_depth() > 0 and cast.dtype is torch.get_autocast_dtype(self._device.type)
        ):
            return None
        if cast._version or tensor.dtype is not cast.dtype or is_away(param):
            return None
        if storage.nbytes() != cast.nbytes or cast.storage_offset():
            return None
        if is_small_part(tensor, storage):  # each part would compute the whole cast again
            return None
        if param._version != weight.version or param.shape != weight.shape:
            return None
        if weight.storage is not None and param.untyped_storage()._cdata != weight.storage.cdata:
            return None
        if storage._cdata not in self._known:  # torch gives this address to no other storage
            if node._sequence_nr() < since:
                return None
            self._known[storage._cdata] = StorageReference(storage)
        held = WeightCast(tensor, cast, param, scope)
        with self._lock:
            self._held.add(held)
        return held

    def keep(self, changing: Iterable[torch.Tensor] | None = None) -> None:
        """Weights are about to change: makes the casts of them that graphs still hold.

        Args:
            changing: parameters of an optimizer; None, or none of the model's: any weight may
                change (an optimizer of copies, such as main weights).
        """
        addresses = {id(one) for one in changing or ()}
        if addresses.isdisjoint(self._weights):
            addresses.clear()
        with self._lock:
            held = list(self._held)
        for one in held:
            if not addresses or one.address in addresses:
                one.keep()
        if addresses:
            for address in addresses:
                self._weights.pop(address, None)
        else:
            self._weights = {}


class WeightCast:
    """What autograd holds in place of a saved cast of a weight.

    Args:
        tensor: that is saved.
        cast: the tensor, or its base: a copy of the parameter.
        param: the weight.
        scope: where it was saved.

    Attributes:
        address: of the parameter.
    """

    __slots__ = (
        *("_alias", "_dtype", "_kept", "_param", "_place", "_refusal", "_scope", "_strides"),
        *("_version", "_view", "_witness", "__weakref__", "address"),
    )

    def __init__(
        self, tensor: torch.Tensor, cast: torch.Tensor, param: torch.nn.Parameter, scope: Scope
    ) -> None:
        self.address = id(param)
        self._param = param  # the graph holds it anyway
        # The weight's bytes and versions, and none of its attributes.
        self._alias: torch.Tensor | None = without_graph(param)
        self._version = param._version
        self._strides = cast.stride()
        self._dtype, self._place = cast.dtype, cast.device
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._witness = witness_of(tensor)
        self._scope = scope
        self._kept: torch.Tensor | None = None
        self._refusal = ""  # why the cast cannot be made any more

    def tensor(self) -> torch.Tensor:
        """The saved tensor, bit for bit.

        Raises:
            ChangedInPlaceError: it, or the weight, was changed since.
        """
        if self._witness._version:
            raise changed_in_place(self._witness, 0, tuple(self._view[0]), self._scope)
        content = self._made() if self._kept is None else self._kept
        tensor = self._witness.detach()
        tensor.data = content.as_strided(*self._view)
        return tensor

    def keep(self) -> None:
        """Makes the cast now, before the weight changes, and keeps it."""
        if self._alias is None or self._refusal:
            return
        try:
            self._kept = self._made()
        except ChangedInPlaceError as error:  # backward may never need it, so raise only then
            self._refusal = str(error)
        self._alias = None

    def _made(self) -> torch.Tensor:
        alias, param = self._alias, self._param
        if self._refusal or alias is None:
            raise ChangedInPlaceError(self._refusal)
        found = ""
        if alias._version != self._version:
            found = f"has been modified by an inplace operation: it is at version {alias._version}"
        elif is_away(param) or _has_less(alias):
            found = "is not in memory"
        if found:
            raise ChangedInPlaceError(
                f"a weight of shape {tuple(alias.shape)}, whose copy in {self._dtype} "
                f"{self._scope} needs for gradient computation, {found}; expected version "
                f"{self._version}, in memory; change weights after the backward pass, or in the "
                "step of a torch.optim optimizer"
            )
        with torch.no_grad():
            content = torch.empty_strided(
                alias.shape, self._strides, dtype=self._dtype, device=self._place
            )
            return content.copy_(alias)


def is_away(param: torch.Tensor) -> bool:
    """Whether the bytes of a parameter may be on a tier: it has another class while its layer does
    not compute (`ComputingParameter`, while it does, says so)."""
    return type(param) is not torch.nn.Parameter and not getattr(param, _IS_PLAIN, False)


def _has_less(tensor: torch.Tensor) -> bool:
    """Whether the memory behind a tensor was freed."""
    return bool(tensor.untyped_storage().nbytes() < tensor.nbytes)
