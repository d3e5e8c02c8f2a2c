# SPDX-License-Identifier: Apache-2.0
"""What is in the place of a gradient on a tier: `OffloadedGradient`, a tensor without bytes.

It is a parameter's `grad` until the optimizer's step, and owns the bytes on the tier: `zero_grad`
drops both. It has the gradient's shape, type and device, so a test whether there is a gradient
works. Any use of its values raises an error that says what to do.

Note [Clipping what is away]
`torch.nn.utils.clip_grad_norm_` computes the norm of each gradient and the norm of these norms, and
scales each gradient by a factor. So we compute the norm of a gradient when it leaves, with the
operation that `clip_grad_norm_` would use. We record the scaling, and apply the same operation when
the gradient comes back. The rest is torch's own, so the bits are the same. On an accelerator
`clip_grad_norm_` uses the per-tensor kernel for tensor subclasses, which may round differently from
the foreach kernel. Pass foreach=True for the bits of the run without offload; any other call
raises. Megatron without kernels of its own uses `torch.norm` on every device, so the caller that
offloads a gradient says which of the two norms will be asked for.

Note [A part of a gradient]
With Megatron's distributed optimizer a rank only has some elements of a gradient's sum over ranks.
The tensor in the place of the whole gradient then allows one slice: exactly these elements, as
Megatron cuts them out.
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


def bucket_of(param: torch.Tensor) -> Bucket | None:
    """The bucket with the bytes of a parameter's gradient; None if the gradient is not away."""
    return param.grad.bucket if isinstance(param.grad, OffloadedGradient) else None


@dataclasses.dataclass(eq=False)
class _Gone:
    """What is known of a gradient that is away; all tensors that stand for it share it."""

    bucket: Bucket | None
    num_elements: int
    norm: torch.Tensor | None
    is_vector_norm: bool  # which of two operations computed it
    later: list[Callable[[torch.Tensor], Any]] = dataclasses.field(default_factory=list)


class OffloadedGradient(torch.Tensor):
    """Stands for a gradient that is away. Made by `away`."""

    _gone: _Gone
    _start: int  # index of the gradient's first element in this tensor, which may have more

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values."""
        where = "used by the optimizer's step" if self.bucket is None else "on a tier"
        return f"OffloadedGradient({tuple(self.shape)}, dtype={self.dtype}, {where})"

    @property
    def bucket(self) -> Bucket | None:
        """The bucket with its bytes, perhaps with other gradients; None: the step has used them."""
        return self._gone.bucket

    def within(self, shape: torch.Size, start: int) -> OffloadedGradient:
        """A tensor that stands for a larger gradient, of which only these elements exist.

        Args:
            shape: of the larger gradient, which is contiguous.
            start: index of the first of these elements in it.
        """
        return _stand_in(self, self._gone, start, shape)

    def brought(self, gradient: torch.Tensor) -> torch.Tensor:
        """The bytes are in memory again: applies the recorded changes to `gradient`."""
        self._gone.bucket = None
        with torch.no_grad():
            for change in self._gone.later:
                change(gradient)
        return gradient

    def kept_norm(self, order: float = _NORM, *, is_vector_norm: bool) -> torch.Tensor:
        """The norm of the gradient, computed when it left.

        Raises:
            OffloadError: another norm is asked for, or the gradient was scaled since.
        """
        gone = self._gone
        is_other = order != _NORM or is_vector_norm != gone.is_vector_norm
        if gone.norm is None or gone.later or is_other or not self._is_all:
            raise self.refusal(f"a norm of order {order}")
        return gone.norm

    def in_a_row(self, func: Any, shape: Sequence[int]) -> OffloadedGradient:
        """The same in one dimension.

        Raises:
            OffloadError: another shape is asked for.
        """
        if list(shape) not in ([-1], [self.numel()]):
            raise self.refusal(str(func))
        return _stand_in(self, self._gone, self._start, torch.Size([self.numel()]))

    def cut(self, func: Any, start: int, end: int) -> OffloadedGradient:
        """The slice that the gradient's elements are of this larger tensor.

        Raises:
            OffloadError: other elements are asked for.
        """
        own = range(self._start, self._start + self._gone.num_elements)
        if self.dim() != 1 or range(start, end) != own:
            raise self.refusal(str(func))
        return _stand_in(self, self._gone, 0, torch.Size([len(own)]))

    @property
    def _is_all(self) -> bool:
        return self.numel() == self._gone.num_elements

    def change_later(self, func: Any, factor: Any, *, in_list: bool) -> None:
        """Records that the gradient is to be scaled when it is back in memory.

        Args:
            func: the operation that scales it in place.
            factor: a number, or a tensor with one.
            in_list: the operation takes a list of tensors.

        Raises:
            OffloadError: the factor is something else, or the optimizer has used the gradient.
        """
        is_number = not isinstance(factor, torch.Tensor) or factor.dim() == 0
        if self.bucket is None or not is_number or not self._is_all:
            raise self.refusal(str(func))
        kept = factor.clone() if isinstance(factor, torch.Tensor) else factor
        self._gone.later.append(lambda gradient: func([gradient] if in_list else gradient, kept))

    def refusal(self, what: str) -> OffloadError:
        """The error for an operation that needs the gradient's values."""
        if self.bucket is None:
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
        """Computes what `clip_grad_norm_` asks for; raises OffloadError for all else."""
        answer = _ANSWERS.get(func)
        others = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, cls)]
        if answer is not None and not kwargs and not others:
            return answer(func, *args)
        own = [one for one in tree_leaves(args[:1]) if isinstance(one, cls)]
        raise (own + others)[0].refusal(str(func))


def away(
    gradient: torch.Tensor, bucket: Bucket | None, *, is_vector_norm: bool | None = None
) -> OffloadedGradient:
    """The tensor that stands for a gradient that leaves.

    Args:
        gradient: in memory.
        bucket: the bucket with its bytes, perhaps with other gradients; None: they were used.
        is_vector_norm: whether `torch.norm` will be asked for; None: the norm that
            `clip_grad_norm_` uses on this device. See Note [Clipping what is away].
    """
    if is_vector_norm is None:
        is_vector_norm = gradient.device.type == "cpu"
    norm = None if bucket is None else _norm_of(gradient, is_vector_norm=is_vector_norm)
    return _stand_in(gradient, _Gone(bucket, gradient.numel(), norm, is_vector_norm))


def _stand_in(
    gradient: torch.Tensor, gone: _Gone, start: int = 0, shape: torch.Size | None = None
) -> OffloadedGradient:
    """A tensor like the gradient; with another shape it is contiguous."""
    stride = gradient.stride() if shape is None else torch.empty(shape, device="meta").stride()
    whole = gradient.shape if shape is None else shape
    made = without_bytes(OffloadedGradient, whole, stride, gradient.dtype, gradient.device)
    made._gone, made._start = gone, start
    return made


def _norm_of(gradient: torch.Tensor, *, is_vector_norm: bool) -> torch.Tensor:
    with torch.no_grad():
        if is_vector_norm:
            return torch.linalg.vector_norm(gradient, _NORM)
        norm: torch.Tensor = torch._foreach_norm([gradient], _NORM)[0]
        return norm


def _vector_norm(func: Any, gradient: OffloadedGradient, order: Any = _NORM, *more: Any) -> Any:
    if more:
        raise gradient.refusal(str(func))
    return gradient.kept_norm(order, is_vector_norm=True)


def _foreach_norm(func: Any, gradients: Sequence[torch.Tensor], *order: Any) -> Any:
    return [
        one.kept_norm(*order, is_vector_norm=one.device.type == "cpu")
        if isinstance(one, OffloadedGradient)
        else func([one], *order)[0]
        for one in gradients
    ]


def _mul(func: Any, gradient: OffloadedGradient, factor: Any) -> Any:
    gradient.change_later(func, factor, in_list=False)
    return gradient


def _foreach_mul(func: Any, gradients: Sequence[torch.Tensor], factor: Any) -> None:
    for one in gradients:
        if isinstance(one, OffloadedGradient):
            one.change_later(func, factor, in_list=True)
        else:
            func([one], factor)


def _same(func: Any, gradient: OffloadedGradient) -> OffloadedGradient:
    return _stand_in(gradient, gradient._gone, gradient._start)


def _slice(
    func: Any, gradient: OffloadedGradient, dim: int, start: int, end: int
) -> OffloadedGradient:
    return gradient.cut(func, start, end)


def _view(func: Any, gradient: OffloadedGradient, shape: Sequence[int]) -> OffloadedGradient:
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
