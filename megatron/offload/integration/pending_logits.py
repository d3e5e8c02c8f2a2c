# SPDX-License-Identifier: Apache-2.0
"""What a model's output layer answers while a chunked loss follows: `PendingLogits`.

`OutputHead` makes one in place of the logits, the loss takes it. What models do with logits before
their loss is carried along, everything else is refused: the logits are never in memory together.
It never computes.

Note [Probes and uses]
Libraries look at everything that a model returns: they ask for an attribute that only a tensor has
(`hasattr`, `getattr` with a default), for a class, for a copy. Such a probe finds an object that is
no tensor, and goes on. A use is an error: each special method, each function of torch, and each
attribute that is taken without a default. Python's `in`, `iter` and `reversed` come to
`__getitem__` and `__len__`, so no method is there for them: an object with `__iter__` would count
as `Iterable`.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from megatron.offload.errors import ConfigurationError


class UsedLogitsError(ConfigurationError, AttributeError):
    """An attribute of logits that are never in memory together; to `hasattr` it is not there."""


class PendingLogits:
    """What logits would be made of, on its way from the output layer to the loss.

    A number that it is multiplied with or divided by, and one `tanh`, are carried along: the logits
    are `soft_cap * tanh(logit_scale * (hidden weight^T + bias) / soft_cap)`.

    Args:
        hidden: [..., hidden], the output layer's input.
        weight: [vocabulary, hidden], or a rank's part of it.
        switch: what asked for this, as people write it.
        bias: [vocabulary], or a rank's part of it; None: there is none.

    Attributes:
        hidden: as given, like the others.
        weight: of the words that are left.
        bias: of the words that are left.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        switch: str,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.hidden, self.weight, self.switch, self.bias = hidden, weight, switch, bias
        self._inner = 1.0  # what the products are multiplied with
        self._outer: float | None = None  # and their tanh; None: there is no tanh

    @property
    def logit_scale(self) -> float:
        """What logits are multiplied with, before they are capped."""
        return self._inner if self._outer is None else self._inner * self._outer

    @property
    def soft_cap(self) -> float | None:
        """What no logit exceeds; None: they are not capped."""
        return self._outer

    @property
    def shape(self) -> torch.Size:
        """Of the logits: [..., vocabulary]."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        """Where the logits would be."""
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> PendingLogits:
        """Itself: there is nothing to lay out."""
        return self

    def float(self) -> PendingLogits:
        """Itself: the loss is computed in fp32."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> PendingLogits:
        """Itself, for a floating type on the same device."""
        probe = torch.empty(0, device=self.device).to(*args, **kwargs)
        if probe.device != self.device or not probe.is_floating_point():
            self.refuse("to")
        return self

    def tanh(self) -> PendingLogits:
        """A soft cap, once."""
        if self._outer is not None:
            self.refuse("a second tanh")
        result = self._copy()
        result._outer = 1.0
        return result

    def __mul__(self, other: Any) -> PendingLogits:
        return self._times(other, operator.mul, "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> PendingLogits:
        return self._times(other, operator.truediv, "truediv")

    def __getitem__(self, key: Any) -> PendingLogits:
        """The first words of a vocabulary that is padded, `[..., :words]`; nothing else."""
        if isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis:
            words = key[1]
            if isinstance(words, slice) and words.step in (None, 1) and words.start in (None, 0):
                result = self._copy()
                result.weight = self.weight[words]
                result.bias = None if self.bias is None else self.bias[words]
                return result
        self.refuse("indexing")

    def __eq__(self, other: object) -> Any:
        if other is None:
            return NotImplemented  # as a tensor, it is not
        self.refuse("eq")

    def __ne__(self, other: object) -> Any:
        if other is None:
            return NotImplemented
        self.refuse("ne")

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols of Python
            raise AttributeError(name)
        raise UsedLogitsError(_sentence(self.switch, name))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        carried = _CARRIED.get(func)
        if carried is not None and not kwargs:
            return carried(*args)
        logits = _first([*args, *(kwargs or {}).values()])
        logits.refuse(getattr(func, "__name__", str(func)))

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse("numpy")

    def __array_ufunc__(self, ufunc: Any, *_: Any, **__: Any) -> NoReturn:
        self.refuse(ufunc.__name__)

    def __copy__(self) -> PendingLogits:
        return self  # it never changes

    def __deepcopy__(self, _: Any) -> PendingLogits:
        return self

    def __reduce__(self) -> Any:
        """A pickle cannot have the weight: pickling raises the error of a use."""
        return PendingLogits, (None, None, self.switch)

    def __repr__(self) -> str:
        return f"PendingLogits(never in memory together with {self.switch})"

    def refuse(self, use: str) -> NoReturn:
        """Raises ConfigurationError for a use of the logits."""
        raise ConfigurationError(_sentence(self.switch, use))

    def _times(self, other: Any, operation: Callable[..., Any], name: str) -> PendingLogits:
        """With a scale that is multiplied with a number, or divided by it."""
        if not isinstance(other, numbers.Real) or isinstance(other, bool):
            self.refuse(f"{name} with what is no number")
        number = float(other)
        if number == 0.0 or not math.isfinite(number):
            self.refuse(f"{name} with {number}")
        result = self._copy()
        if self._outer is None:
            result._inner = operation(self._inner, number)
        else:
            result._outer = operation(self._outer, number)
        return result

    def _copy(self) -> PendingLogits:
        result = PendingLogits(self.hidden, self.weight, self.switch, self.bias)
        result._inner, result._outer = self._inner, self._outer
        return result


_CARRIED: dict[Any, Callable[..., Any]] = {
    torch.tanh: PendingLogits.tanh,
    torch.mul: operator.mul,
    torch.multiply: operator.mul,
    torch.div: operator.truediv,
    torch.divide: operator.truediv,
    torch.true_divide: operator.truediv,
}

_REFUSED = (
    *("add", "radd", "sub", "rsub", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "divmod"),
    *("rdivmod", "pow", "rpow", "matmul", "rmatmul", "and", "rand", "or", "ror", "xor", "rxor"),
    *("lshift", "rlshift", "rshift", "rrshift", "lt", "le", "gt", "ge", "neg", "pos", "abs"),
    *("invert", "round", "trunc", "floor", "ceil", "bool", "int", "float", "complex", "index"),
    *("len", "setitem", "delitem"),
)


def _refusal(use: str) -> Callable[..., NoReturn]:
    def method(self: PendingLogits, *_: Any) -> NoReturn:
        self.refuse(use)

    return method


for _name in _REFUSED:  # Python looks for special methods on the class, and not by __getattr__
    setattr(PendingLogits, f"__{_name}__", _refusal(_name))


def _sentence(switch: str, use: str) -> str:
    return (
        f"the logits of this model are used ({use}) and not only for its loss; with {switch} they "
        f"are never in memory together. Drop {switch}, or compute them in a pass of their own "
        "without labels"
    )


def _first(values: Iterable[Any]) -> PendingLogits:
    """The first pending logits among arguments of a function, which may be in lists."""
    for value in values:
        if isinstance(value, PendingLogits):
            return value
        if isinstance(value, list | tuple):
            try:
                return _first(value)
            except LookupError:
                continue
    raise LookupError
