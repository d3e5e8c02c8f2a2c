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
other one (`foreach=True`), and any other way is an error. Megatron without kernels of its own takes
`torch.norm` everywhere; whoever makes the gradient leave says by which of the two its norm is.

Note [A part of a gradient]
With Megatron's distributed optimizer a rank has the sum over ranks of some elements of a gradient
alone. What is in the place of the whole one then gives exactly these, cut out as Megatron does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.errors import GRADIENTS_PREFIX, OffloadError
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.placeholder import without_bytes

_NORM = 2.0


def piece_of(param: torch.Tensor) -> Bucket | None:
    """What has the bytes of a parameter's gradient, if that is away."""
    return param.grad.piece if isinstance(param.grad, AwayGradient) else None


@dataclasses.dataclass(eq=False)
class _Gone:
    """What is known of a gradient that is away, for all that stand for it."""

    piece: Bucket | None
    num_elements: int
    norm: torch.Tensor | None
    is_vector_norm: bool  # which of two operations gave it
    later: list[Callable[[torch.Tensor], Any]] = dataclasses.field(default_factory=list)


class AwayGradient(torch.Tensor):
    """Stands for a gradient. Made by `away`."""

    _gone: _Gone
    _start: int  # of the gradient's elements in this, which may have more

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values."""
        where = "used by the optimizer's step" if self.piece is None else "on a tier"
        return f"AwayGradient({tuple(self.shape)}, dtype={self.dtype}, {where})"

    @property
    def piece(self) -> Bucket | None:
        """What has its bytes, perhaps with those of others; None: nobody has, they were used."""
        return self._gone.piece

    def within(self, shape: torch.Size, start: int) -> AwayGradient:
        """Stands for a larger gradient, of which this is all that is known.

        Args:
            shape: of the larger one, which is contiguous.
            start: of this in it, in elements.
        """
        return _stand_in(self, self._gone, start, shape)

    def brought(self, gradient: torch.Tensor) -> torch.Tensor:
        """Its bytes are there again: `gradient`, with what was asked for meanwhile done to it."""
        self._gone.piece = None
        with torch.no_grad():
            for change in self._gone.later:
                change(gradient)
        return gradient

    def kept_norm(self, order: float = _NORM, *, is_vector_norm: bool) -> torch.Tensor:
        """Of the gradient, as when it left.

        Raises:
            OffloadError: it is another one, or the gradient is to be scaled meanwhile.
        """
        gone = self._gone
        is_other = order != _NORM or is_vector_norm != gone.is_vector_norm
        if gone.norm is None or gone.later or is_other or not self._is_all:
            raise self.refusal(f"a norm of order {order}")
        return gone.norm

    def in_a_row(self, func: Any, shape: Sequence[int]) -> AwayGradient:
        """With one dimension.

        Raises:
            OffloadError: another shape was asked for.
        """
        if list(shape) not in ([-1], [self.numel()]):
            raise self.refusal(str(func))
        return _stand_in(self, self._gone, self._start, torch.Size([self.numel()]))

    def cut(self, func: Any, start: int, end: int) -> AwayGradient:
        """The gradient that this has more elements than.

        Raises:
            OffloadError: others were asked for.
        """
        own = range(self._start, self._start + self._gone.num_elements)
        if self.dim() != 1 or range(start, end) != own:
            raise self.refusal(str(func))
        return _stand_in(self, self._gone, 0, torch.Size([len(own)]))

    @property
    def _is_all(self) -> bool:
        return self.numel() == self._gone.num_elements

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
        if self.piece is None or not is_number or not self._is_all:
            raise self.refusal(str(func))
        kept = factor.clone() if isinstance(factor, torch.Tensor) else factor
        self._gone.later.append(lambda gradient: func([gradient] if in_list else gradient, kept))

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


def away(
    gradient: torch.Tensor, piece: Bucket | None, *, is_vector_norm: bool | None = None
) -> AwayGradient:
    """What stands for a gradient that leaves.

    Args:
        gradient: in memory.
        piece: has its bytes, perhaps with those of others; None: nobody has, they were used.
        is_vector_norm: the norm that will be asked for is `torch.norm`; None: the one that
            `clip_grad_norm_` takes on this device. See Note [Clipping what is away].
    """
    if is_vector_norm is None:
        is_vector_norm = gradient.device.type == "cpu"
    norm = None if piece is None else _norm_of(gradient, is_vector_norm=is_vector_norm)
    return _stand_in(gradient, _Gone(piece, gradient.numel(), norm, is_vector_norm))


def _stand_in(
    gradient: torch.Tensor, gone: _Gone, start: int = 0, shape: torch.Size | None = None
) -> AwayGradient:
    """Like a gradient; with another shape it is contiguous."""
    stride = gradient.stride() if shape is None else torch.empty(shape, device="meta").stride()
    whole = gradient.shape if shape is None else shape
    made = without_bytes(AwayGradient, whole, stride, gradient.dtype, gradient.device)
    made._gone, made._start = gone, start
    return made


def _norm_of(gradient: torch.Tensor, *, is_vector_norm: bool) -> torch.Tensor:
    with torch.no_grad():
        if is_vector_norm:
            return torch.linalg.vector_norm(gradient, _NORM)
        norm: torch.Tensor = torch._foreach_norm([gradient], _NORM)[0]
        return norm


def _vector_norm(func: Any, gradient: AwayGradient, order: Any = _NORM, *more: Any) -> Any:
    if more:
        raise gradient.refusal(str(func))
    return gradient.kept_norm(order, is_vector_norm=True)


def _foreach_norm(func: Any, gradients: Sequence[torch.Tensor], *order: Any) -> Any:
    return [
        one.kept_norm(*order, is_vector_norm=one.device.type == "cpu")
        if isinstance(one, AwayGradient)
        else func([one], *order)[0]
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


def _same(func: Any, gradient: AwayGradient) -> AwayGradient:
    return _stand_in(gradient, gradient._gone, gradient._start)


def _slice(func: Any, gradient: AwayGradient, dim: int, start: int, end: int) -> AwayGradient:
    return gradient.cut(func, start, end)


def _view(func: Any, gradient: AwayGradient, shape: Sequence[int]) -> AwayGradient:
    return gradient.in_a_row(func, shape)


_aten = torch.ops.aten
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _view,
    _aten.slice.Tensor: _slice,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _mul,
    _aten._foreach_mul_.Tensor: _foreach_mul,
    _aten._foreach_mul_.Scalar: _foreach_mul,
}
