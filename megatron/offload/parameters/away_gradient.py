# SPDX-License-Identifier: Apache-2.0
"""What is in the place of a gradient that is on a tier: `AwayGradient`, a tensor without bytes.

It is a parameter's `grad` until the optimizer's step, and owns the bytes on the tier: `zero_grad`
drops both. It has the shape, the type and the device, so that whoever asks whether there is a
gradient gets the answer; whoever asks for its values gets an error with a sentence.

Note [Clipping what is away]
`torch.nn.utils.clip_grad_norm_` takes the norm of each gradient, the norm of these, and scales each
gradient by a factor. So the norm of a gradient is taken when it leaves, by the operation that
`clip_grad_norm_` would take, and what it is to be scaled by waits until it comes back and is then
done by the operation that was asked for. All else is torch's own: the same bits. On an accelerator
`clip_grad_norm_` chooses between two kernels, which may round differently, and takes the slower one
for tensors that are not torch's own, all of them: who wants to have the bits of before asks for the
other one (`foreach=True`), and any other way is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.errors import GRADIENTS_PREFIX, OffloadError
from megatron.offload.states.bucket import Bucket

_NORM = 2.0


def piece_of(param: torch.Tensor) -> Bucket | None:
    """What has the bytes of a parameter's gradient, if that is away."""
    return param.grad.piece if isinstance(param.grad, AwayGradient) else None


class AwayGradient(torch.Tensor):
    """Stands for a gradient.

    Args:
        gradient: in memory.
        piece: has its bytes, perhaps with those of others; None: nobody has, they were used.

    Attributes:
        piece: the same.
    """

    piece: Bucket | None
    _norm: torch.Tensor | None
    _later: list[Callable[[torch.Tensor], Any]]

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, piece: Bucket | None) -> AwayGradient:
        """See the class."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: AwayGradient = make(
            cls,
            gradient.shape,
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
        )
        return made

    def __init__(self, gradient: torch.Tensor, piece: Bucket | None) -> None:
        self.piece = piece
        self._norm = None if piece is None else _norm_of(gradient)
        self._later = []

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values."""
        where = "used by the optimizer's step" if self.piece is None else "on a tier"
        return f"AwayGradient({tuple(self.shape)}, dtype={self.dtype}, {where})"

    def brought(self, gradient: torch.Tensor) -> torch.Tensor:
        """Its bytes are there again: `gradient`, with what was asked for meanwhile done to it."""
        self.piece = None
        with torch.no_grad():
            for change in self._later:
                change(gradient)
        return gradient

    def kept_norm(self, order: float = _NORM) -> torch.Tensor:
        """Of the gradient, as when it left.

        Raises:
            OffloadError: it is another one, or the gradient is to be scaled meanwhile.
        """
        if self._norm is None or self._later or order != _NORM:
            raise self.refusal(f"a norm of order {order}")
        return self._norm

    def change_later(self, func: Any, factor: Any, *, in_list: bool) -> None:
        """Scales the gradient once it is there.

        Args:
            func: the operation that does it, in place.
            factor: a number, or a tensor with one.
            in_list: the operation takes a list of tensors.

        Raises:
            OffloadError: the factor is something else, or the gradient was used.
        """
        is_number = not isinstance(factor, torch.Tensor) or factor.dim() == 0
        if self.piece is None or not is_number:
            raise self.refusal(str(func))
        kept = factor.clone() if isinstance(factor, torch.Tensor) else factor
        self._later.append(lambda gradient: func([gradient] if in_list else gradient, kept))

    def refusal(self, what: str) -> OffloadError:
        """The error for who wants to have something of it that only its bytes give."""
        if self.piece is None:
            return OffloadError(
                f"{GRADIENTS_PREFIX}{what} was asked for after the optimizer's step, which has "
                "used this gradient and dropped it; look at gradients before the step, and call "
                "zero_grad() before the next backward pass"
            )
        return OffloadError(
            f"{GRADIENTS_PREFIX}{what} was asked for of a gradient that is on a tier until the "
            "optimizer's step; torch.nn.utils.clip_grad_norm_ works once for norms of order 2 (on "
            "an accelerator with foreach=True), zero_grad() with set_to_none=True; for anything "
            "else call bring_gradients() of the handle of offload_parameters before"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers what `clip_grad_norm_` asks for; raises OffloadError for all else."""
        answer = _ANSWERS.get(func)
        others = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, cls)]
        if answer is not None and not kwargs and not others:
            return answer(func, *args)
        own = [one for one in tree_leaves(args[:1]) if isinstance(one, cls)]
        raise (own + others)[0].refusal(str(func))


def _norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """By the operation that `clip_grad_norm_` takes for gradients on this device."""
    with torch.no_grad():
        if gradient.device.type == "cpu":
            return torch.linalg.vector_norm(gradient, _NORM)
        norm: torch.Tensor = torch._foreach_norm([gradient], _NORM)[0]
        return norm


def _vector_norm(func: Any, gradient: AwayGradient, order: Any = _NORM, *more: Any) -> Any:
    if more or gradient.device.type != "cpu":
        raise gradient.refusal(str(func))
    return gradient.kept_norm(order)


def _foreach_norm(func: Any, gradients: Sequence[torch.Tensor], *order: Any) -> Any:
    return [
        one.kept_norm(*order) if isinstance(one, AwayGradient) else func([one], *order)[0]
        for one in gradients
    ]


def _mul(func: Any, gradient: AwayGradient, factor: Any) -> Any:
    gradient.change_later(func, factor, in_list=False)
    return gradient


def _foreach_mul(func: Any, gradients: Sequence[torch.Tensor], factor: Any) -> None:
    for one in gradients:
        if isinstance(one, AwayGradient):
            one.change_later(func, factor, in_list=True)
        else:
            func([one], factor)


_aten = torch.ops.aten
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _mul,
    _aten._foreach_mul_.Tensor: _foreach_mul,
    _aten._foreach_mul_.Scalar: _foreach_mul,
}
