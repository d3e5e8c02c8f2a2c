# SPDX-License-Identifier: Apache-2.0
"""What a parameter of a unit is: away, `OffloadedParameter`; while its layer computes, another.

A unit (`unit.py`) swaps its parameters out and in: the parameter objects stay and have another
class while they are away. So whatever a script, a trainer or a library does with one (reads it,
changes it in place or through `data`, replaces it, copies or saves it), the class first puts the
real values in place, and the unit keeps what was changed there. The tensor below the class is full
of NaN: code that bypasses Python's dispatch finds NaN, never old bytes and never zeros.

Note [What needs no bytes]
A query of a parameter's shape, type, device or gradient needs none of its bytes: it is answered at
once. So is a conversion to what the parameter is already (`model.to(device)`).

Note [What autograd saves of one that is away]
Autograd saves a parameter that is an operation's argument, and reads it in the backward pass, when
its unit may be away again. A penalty on weights does this. A mapped parameter keeps its values for
every holder, so autograd saves it as it is; of one in memory it saves a copy. A transform of
torch.func has no hooks for that: there it saves a view, with which the unit stays in memory
(`handed_out.py`).

Note [Written through data]
A layer may write its own weights in its forward: an ActNorm sets them from its first batch, others
clamp them in each. A write through `param.data` leaves the parameter's version alone, but each
tensor that `data` returns has a version of its own, from zero on. So while a layer computes, its
parameters have a class that keeps what `data` has returned, and calls no Python otherwise. During
an optimizer's step they are plain parameters, whose type torch's optimizers look at.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.offload.errors import PARAMETERS_PREFIX, OffloadError
from megatron.offload.machine.transform import in_transform

# Attributes that read its bytes.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_ABOUT = {
    "__len__",
    "_has_compatible_shallow_copy_type",
    "backward",
    "dim",
    "element_size",
    "get_device",
    "grad",  # torch.autograd.grad
    "is_complex",
    "is_floating_point",
    "is_inference",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "size",
}
_OURS = ("_away", "_read")  # attributes
_CONVERSIONS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"}


class Away(NamedTuple):
    """What the away parameters of a unit share.

    Attributes:
        name: of the unit.
        params: of the unit.
        show: puts them in their places; says whether these values stay valid when the unit leaves.
    """

    name: str
    params: Sequence[torch.nn.Parameter]
    show: Callable[[], bool]


class _OfUnit(torch.nn.Parameter):
    """A parameter whose class is ours for a while; copies of it are plain parameters."""

    is_plain = False  # for activations, which may be computed again from a plain one

    def _come(self) -> None:
        """Has its values in its place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A copy of the parameter."""
        if id(self) not in memo:
            self._come()
            with torch._C.DisableTorchFunctionSubclass():
                value = self.detach().clone(memory_format=torch.preserve_format)
                memo[id(self)] = torch.nn.Parameter(value, self.requires_grad)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickle saves of the parameter."""
        self._come()
        with torch._C.DisableTorchFunctionSubclass():
            value = self.detach()
            if value.untyped_storage().nbytes() > value.nbytes:  # pickle saves whole storages
                value = value.clone(memory_format=torch.preserve_format)
            same = torch.nn.Parameter(value, self.requires_grad)
        vars(same).update({name: one for name, one in vars(self).items() if name not in _OURS})
        return same.__reduce_ex__(protocol)


class ComputingParameter(_OfUnit):
    """A parameter whose layer computes: see Note [Written through data]. `watch` gives the class.

    Attributes:
        data: as torch has it; what it returned is kept in a list.
    """

    is_plain = True
    _read: list[torch.Tensor]

    @property
    def data(self) -> torch.Tensor:
        value = super().data
        self._read.append(value)
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]


class OffloadedParameter(_OfUnit):
    """A parameter that is not in its place. `leave` gives a parameter this class."""

    _away: Away

    # A graph of torch.compile would keep what it traces here, and would later run while the
    # parameters are away again.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function with the parameters in their places.

        Raises:
            LostStateError: the tier could not read them.
            OffloadError: this tensor is no longer in the place of a parameter.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _needs_no_bytes(func, args):
                return func(*args, **kwargs)
            if func.__name__ in _CONVERSIONS:
                converted = func(*args, **kwargs)
                if converted is args[0] or not isinstance(converted, torch.Tensor):
                    return converted
            own = [one for one in tree_leaves((args, kwargs)) if type(one) is cls]
            stay = {id(one): _show(one) for one in own}
            if func is torch.Tensor.detach and _makes_parameter():
                return own[0]._replacement(func(*args, **kwargs))
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            if in_transform():
                args, kwargs = tree_map_only(cls, _view, (args, kwargs))
                return func(*args, **kwargs)
            kept = {one.untyped_storage()._cdata: stay[id(one)] for one in own}
            pack = functools.partial(_pack, kept)
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return func(*args, **kwargs)

    def _come(self) -> None:
        _show(self)

    @classmethod
    def _replacement(cls, value: torch.Tensor) -> torch.Tensor:
        """What `torch.nn.Parameter(param)` makes another parameter of: see `_is_param`."""
        made: torch.Tensor = torch.Tensor._make_subclass(cls, value, False)
        return made

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        """`torch.nn.Parameter` wants the class of what it was given, and marks it at its end."""
        self.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def _makes_parameter() -> bool:
    """Whether `torch.nn.Parameter(param)` has asked for the values."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES_OF_DISPATCH):
        if frame.f_code is torch.nn.Parameter.__new__.__code__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


_FRAMES_OF_DISPATCH = 8  # from `__torch_function__` to the caller, and some more


def watch(param: torch.nn.Parameter, read: list[torch.Tensor]) -> None:
    """From now on what its `data` returns is added to a list; the parameter is in its place."""
    vars(param)["_read"] = read
    param.__class__ = ComputingParameter


def leave(param: torch.nn.Parameter, away: Away) -> None:
    """From now on a use of the parameter shows it first."""
    vars(param)["_away"] = away
    param.__class__ = OffloadedParameter


def arrive(param: torch.nn.Parameter) -> None:
    """Ends `leave` and `watch`: a plain parameter, whose bytes are in their place."""
    if isinstance(param, _OfUnit):
        param.__class__ = torch.nn.Parameter  # type: ignore[assignment]
        for name in _OURS:
            vars(param).pop(name, None)


def _view(param: torch.Tensor) -> torch.Tensor:
    return param.view_as(param)


def _show(param: OffloadedParameter) -> bool:
    away = param._away
    if not any(one is param for one in away.params):
        raise OffloadError(
            f"{PARAMETERS_PREFIX}the values of a tensor were asked for that has none: it was in "
            f"the place of a parameter of {away.name} while that was on a tier, and was swapped "
            "with another tensor (torch.utils.swap_tensors); call expose() of the handle before"
        )
    return away.show()


# Note [What autograd saves of one that is away]: a tensor, and its version at that time.
_Saved = tuple[torch.Tensor, int]


def _pack(kept: Mapping[int, bool], tensor: torch.Tensor) -> _Saved:
    stays = kept.get(tensor.untyped_storage()._cdata)
    saved = tensor if stays is None else tensor.detach()
    return (saved.clone() if stays is False else saved), tensor._version


def _unpack(saved: _Saved) -> torch.Tensor:
    tensor, version = saved
    if tensor._version > version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation: what was computed with a parameter outside of its layer"
        )
    return tensor


def _needs_no_bytes(func: Any, args: tuple[Any, ...]) -> bool:
    """Note [What needs no bytes]."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        is_same = len(args) > 1 and args[1] is args[0]  # a conversion to the same type assigns it
        return is_same or func.__self__.__name__ not in _VALUES
    return name in _ABOUT
