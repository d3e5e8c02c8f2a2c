# SPDX-License-Identifier: Apache-2.0
"""What a replay runs: operations with their arguments in the order in which a program has them.

The table of `replayable_nodes.py` says which node of autograd is which of these.

Note [Norms by their statistics]
A layer norm without weight belongs to no module that could say its eps. It does not need one:
autograd saves the mean and the deviation that its kernels use, and `(x - mean) * rstd` has no sum
behind a product, which a compiler may fuse. So its bits are those of the kernels; likewise those of
the fused RMS norm of accelerators, `x * rstd * weight`. Accelerators save statistics in fp32. A CPU
rounds them to the type of the input, and a norm in 16 bits is saved there as usual.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from megatron.offload.activations.saved.recipe import Layout, Step, require_same_values
from megatron.offload.errors import OffloadError


def add(one: torch.Tensor, other: torch.Tensor, alpha: float) -> torch.Tensor:
    """`one + alpha * other`."""
    return torch.add(one, other, alpha=alpha)


def sub(one: torch.Tensor, other: torch.Tensor, alpha: float) -> torch.Tensor:
    """`one - alpha * other`."""
    return torch.sub(one, other, alpha=alpha)


def add_scalar(one: torch.Tensor, scalar: float) -> torch.Tensor:
    """`one + scalar`, as `one - -scalar`."""
    return torch.add(one, scalar)


def subtract_from(one: torch.Tensor, scalar: float) -> torch.Tensor:
    """`scalar - one`."""
    return torch.rsub(one, scalar)


def layer_norm(
    one: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rstd: torch.Tensor,
    shape: tuple[int, ...],
    eps: float,
    *,
    is_exact: bool = True,
) -> torch.Tensor:
    """Layer norm with its arguments in the order of a program.

    Args:
        rstd: one over the standard deviation, as forward has saved it.
        is_exact: no codec has changed the input. Else its deviation is not that of forward.

    Raises:
        OffloadError: that is another one now, so the eps is not the one of forward.
    """
    result, _, found = torch.native_layer_norm(one, shape, weight, bias, eps)
    if not is_exact:
        return result
    sentence = (
        f"a layer norm that runs again with the eps {eps} of its module divides by another "
        "deviation than in forward, which used another eps; set --activation-replay off"
    )
    require_same_values(found, rstd, OffloadError, sentence)
    return result


layer_norm_of_decoded = functools.partial(layer_norm, is_exact=False)


def normed(
    one: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """A norm by the statistics that forward has saved: Note [Norms by their statistics].

    Raises:
        OffloadError: they are rounded, so forward did not multiply by these.
    """
    if rstd.dtype.itemsize < torch.float32.itemsize:
        raise OffloadError("the statistics of a norm are rounded")
    wide = torch.mul(one, rstd) if mean is None else torch.sub(one, mean).mul_(rstd)
    if weight is not None:
        wide.mul_(weight)
    elif mean is not None and not wide.is_cuda:
        wide.add_(0.0)  # as if there were a bias: -0 becomes 0
    return wide.to(one.dtype)


def group_norm(one: torch.Tensor, *others: Any) -> torch.Tensor:
    """Group norm with its arguments in their order.

    Raises:
        OffloadError: channels come last, and a CPU adds them up in as many parts as it has threads.
    """
    require_contiguous(one)
    return torch.native_group_norm(one, *others)[0]


def batch_norm(
    one: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Batch norm by the statistics of its input; those that run on are left alone.

    CUDA has a kernel for saved statistics.

    Raises:
        OffloadError: as `group_norm`; where a channel has one value a sample, channels come last.
    """
    if one.is_cuda:
        return torch.batch_norm_elemt(one, weight, bias, mean, rstd, eps)
    require_contiguous(one, is_last=one.stride(1) == 1)
    running = torch.zeros_like(mean), torch.zeros_like(mean)  # whose type a CPU computes in
    return torch.native_batch_norm(one, weight, bias, *running, True, 0.0, eps)[0]


def batch_norm_evaluated(*operands: Any) -> torch.Tensor:
    """Batch norm by the statistics that have run on, as in evaluations and frozen layers."""
    *tensors, eps = operands
    result: torch.Tensor = torch.ops.aten.native_batch_norm(*tensors, False, 0.0, eps)[0]
    return result


def require_contiguous(one: torch.Tensor, *, is_last: bool = False) -> None:
    """Raises OffloadError where a CPU adds up in as many parts as it has threads."""
    if is_last or not one.is_contiguous():
        raise OffloadError("the bits of the norm depend on the number of threads")


def gelu(one: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU; `approximate` as `torch.nn.functional.gelu` has it."""
    return F.gelu(one, approximate=approximate)


def elu(one: torch.Tensor, *constants: float) -> torch.Tensor:
    """ELU, or a relative of it by its three constants: alpha, scale, scale of the input."""
    return torch.ops.aten.elu(one, *constants)


def glu(one: torch.Tensor, dim: int) -> torch.Tensor:
    """One half of a dimension times the sigmoid of the other half."""
    return F.glu(one, dim)


def cast(one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another type."""
    return one.to(dtype, copy=True)


def cat(*values: Any) -> torch.Tensor:
    """All values but the last one, concatenated along that dimension."""
    *tensors, dim = values
    return torch.cat(tensors, dim)


def stack(*values: Any) -> torch.Tensor:
    """All values but the last one, stacked along that new dimension."""
    *tensors, dim = values
    return torch.stack(tensors, dim)


def index(one: torch.Tensor, *indices: torch.Tensor | None) -> torch.Tensor:
    """`one[indices]`, as experts get the tokens that are routed to them.

    Raises:
        OffloadError: a mask is among them, whose number of values the host would wait for.
    """
    if any(_is_mask(found) for found in indices):
        raise OffloadError("how much a mask selects is known to the device alone")
    return torch.ops.aten.index(one, indices)


def _is_mask(found: torch.Tensor | None) -> bool:
    """Whether it selects by True, on an accelerator: its host does not know how many there are."""
    return (
        found is not None
        and found.device.type != "cpu"
        and found.dtype in (torch.bool, torch.uint8)
    )


def index_select(one: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of a dimension."""
    return torch.index_select(one, dim, indices)


def gather(one: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """One value for each index, along a dimension."""
    return torch.gather(one, dim, indices)


def slice_of(one: torch.Tensor, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    """`one[start:end:step]` of a dimension, a view."""
    return torch.ops.aten.slice(one, dim, start, end, step)


def split(one: torch.Tensor, size: int, dim: int, number: int) -> torch.Tensor:
    """One of the parts of that size, a view."""
    return torch.split(one, size, dim)[number]


def split_sizes(one: torch.Tensor, sizes: tuple[int, ...], dim: int, number: int) -> torch.Tensor:
    """One of the parts of those sizes, a view."""
    return torch.split(one, list(sizes), dim)[number]


def unbind(one: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    """One of the slices of a dimension, a view."""
    return torch.unbind(one, dim)[number]


def alias(one: torch.Tensor) -> torch.Tensor:
    """All of a tensor, as `one[:]` gives it."""
    return torch.ops.aten.alias(one)


def log_softmax(one: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Log-softmax in that type: of the input, or fp32."""
    return torch.ops.aten._log_softmax(one, dim, one.dtype is not dtype)


def clamp(one: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Values between two bounds; None: there is none."""
    return torch.clamp(one, low, high)


def where(one: torch.Tensor, other: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    """`one` where the condition holds, else `other`."""
    return torch.where(condition, one, other)


def dropped_out(one: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Dropout with the mask of forward, while training.

    Raises:
        OffloadError: it drops all, and forward does not divide by 0.
    """
    if probability == 1.0:
        raise OffloadError("dropout of all values divides by nothing")
    return one.mul(mask).mul_(1.0 / (1.0 - probability))


# Forward computes these by other kernels, so that it is a claim of its own that bits are the same.
OF_OTHER_KERNELS = frozenset({normed, batch_norm, dropped_out})


def steps_of_a_row(steps: tuple[Step, ...], layout: Layout) -> tuple[Step, ...]:
    """What makes a row of a log-softmax of the same row of its operand: Note [Row by row].

    Empty: the program is another one.
    """
    last, (shape, stride, _) = steps[-1], layout
    found: list[Step] = []
    if last.operation is not log_softmax or last.constants[0] % len(shape) != len(shape) - 1:
        return ()
    for number, step in enumerate(steps):
        if step.values != ((number - 1,) if number else (~0,)):
            return ()
        if step is last:
            found.append(last._replace(constants=(-1, *last.constants[1:])))
        elif step.operation is cast:
            found.append(step)
        elif step.operation is not torch.reshape:  # which leaves values in their order
            return ()
    num_values = 1
    for size, step_over in zip(reversed(shape), reversed(stride), strict=True):
        if step_over != num_values:
            return ()
        num_values *= size
    return tuple(found)
