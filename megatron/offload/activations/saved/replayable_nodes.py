# SPDX-License-Identifier: Apache-2.0
"""Nodes of autograd whose operation can be run again for little: `operation_of`, `add_function`.

A table: for each type of node the operation, the saved tensors that are its inputs, and the
attributes that are its constants. Recipes are made of it; nothing here looks at bytes.

What is not in the table is not replayed: operations that draw random numbers, that communicate, or
that cost as much as a matrix product; softmax, whose input nothing saves. Nor does anything save
that of log-softmax, but logits of half its bytes may be there: see Note [Results of modules].

Note [Norms by their statistics]
A layer norm without weight belongs to no module that could say its eps. It does not need one:
autograd saves the mean and the deviation that its kernels use, and `(x - mean) * rstd` has no sum
behind a product, which a compiler may fuse. So its bits are those of the kernels; likewise those of
the fused RMS norm of accelerators, `x * rstd * weight`. Accelerators save statistics in fp32. A CPU
rounds them to the type of the input, and a norm in 16 bits is saved there as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.offload.activations.saved.recipe import Layout, Operation, Step, require_same_values
from megatron.offload.errors import OffloadError

_LARGEST_DIMENSION = 1 << 63  # autograd shows a negative dimension as that much more


class NodeOperation(NamedTuple):
    """What a node of autograd computed.

    Attributes:
        operation: gets the inputs, then the constants.
        inputs: for each input the name of the saved tensor that it is; None: the node saves no
            such. Input n is that of edge n of the node.
        constants: names of attributes; `SHAPE`, `DTYPE` and `NUMBER` are those of the result.
        missing: the constant that the node does not show, `EPS` or `SCALAR`; it comes last.
        optional: inputs that may be missing.
        instead: says of a node which operation it is; None: this one.
        by_layout: a CPU rounds some values otherwise than others, and which these are depends on
            how the inputs lie in memory. Not so where the constant is a factor of 1.
    """

    operation: Operation
    inputs: tuple[str | None, ...] = (None,)
    constants: tuple[str, ...] = ()
    missing: str = ""
    optional: tuple[str, ...] = ()
    instead: Callable[[Any], NodeOperation | None] = lambda _: None
    by_layout: bool = False


SHAPE, DTYPE, NUMBER = "shape", "dtype", "number"
BIAS = "bias"  # that the node saves, or that of its edge, or a frozen one that a module has
RUNNING = ("running_mean", "running_var")  # which later passes change behind autograd's back
EPS, SCALAR = "eps", "scalar"


def _add(one: torch.Tensor, other: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.add(one, other, alpha=alpha)


def _sub(one: torch.Tensor, other: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.sub(one, other, alpha=alpha)


def add_scalar(one: torch.Tensor, scalar: float) -> torch.Tensor:
    """`one + scalar`, as `one - -scalar`."""
    return torch.add(one, scalar)


def subtract_from(one: torch.Tensor, scalar: float) -> torch.Tensor:
    """`scalar - one`."""
    return torch.rsub(one, scalar)


def _layer_norm(
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


layer_norm_of_decoded = functools.partial(_layer_norm, is_exact=False)


def _normed(
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


def _group_norm(one: torch.Tensor, *others: Any) -> torch.Tensor:
    """Group norm with its arguments in their order.

    Raises:
        OffloadError: channels come last, and a CPU adds them up in as many parts as it has threads.
    """
    _require_contiguous(one)
    return torch.native_group_norm(one, *others)[0]


def _batch_norm(
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
        OffloadError: as `_group_norm`; where a channel has one value a sample, channels come last.
    """
    if one.is_cuda:
        return torch.batch_norm_elemt(one, weight, bias, mean, rstd, eps)
    _require_contiguous(one, is_last=one.stride(1) == 1)
    running = torch.zeros_like(mean), torch.zeros_like(mean)  # whose type a CPU computes in
    return torch.native_batch_norm(one, weight, bias, *running, True, 0.0, eps)[0]


def _batch_norm_evaluated(*operands: Any) -> torch.Tensor:
    """Batch norm by the statistics that have run on, as in evaluations and frozen layers."""
    *tensors, eps = operands
    result: torch.Tensor = torch.ops.aten.native_batch_norm(*tensors, False, 0.0, eps)[0]
    return result


def _require_contiguous(one: torch.Tensor, *, is_last: bool = False) -> None:
    if is_last or not one.is_contiguous():
        raise OffloadError("the bits of the norm depend on the number of threads")


def _gelu(one: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(one, approximate=approximate)


def _elu(one: torch.Tensor, *constants: float) -> torch.Tensor:
    return torch.ops.aten.elu(one, *constants)


def _glu(one: torch.Tensor, dim: int) -> torch.Tensor:
    return F.glu(one, dim)


def _cast(one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return one.to(dtype, copy=True)


def _cat(*values: Any) -> torch.Tensor:
    *tensors, dim = values
    return torch.cat(tensors, dim)


def _stack(*values: Any) -> torch.Tensor:
    *tensors, dim = values
    return torch.stack(tensors, dim)


def _slice(one: torch.Tensor, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    return torch.ops.aten.slice(one, dim, start, end, step)


def _split(one: torch.Tensor, size: int, dim: int, number: int) -> torch.Tensor:
    return torch.split(one, size, dim)[number]


def _split_sizes(one: torch.Tensor, sizes: tuple[int, ...], dim: int, number: int) -> torch.Tensor:
    return torch.split(one, list(sizes), dim)[number]


def _unbind(one: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    return torch.unbind(one, dim)[number]


def _alias(one: torch.Tensor) -> torch.Tensor:
    """All of a tensor, as `one[:]` gives it."""
    return torch.ops.aten.alias(one)


def _log_softmax(one: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.aten._log_softmax(one, dim, one.dtype is not dtype)


def _clamp(one: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    return torch.clamp(one, low, high)


def _where(one: torch.Tensor, other: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, one, other)


def _dropped_out(one: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    return one.mul(mask).mul_(1.0 / (1.0 - probability))


def steps_of_a_row(steps: tuple[Step, ...], layout: Layout) -> tuple[Step, ...]:
    """What makes a row of a log-softmax of the same row of its operand: Note [Row by row].

    Empty: the program is another one.
    """
    last, (shape, stride, _) = steps[-1], layout
    found: list[Step] = []
    if last.operation is not _log_softmax or last.constants[0] % len(shape) != len(shape) - 1:
        return ()
    for number, step in enumerate(steps):
        if step.values != ((number - 1,) if number else (~0,)):
            return ()
        if step is last:
            found.append(last._replace(constants=(-1, *last.constants[1:])))
        elif step.operation is _cast:
            found.append(step)
        elif step.operation is not torch.reshape:  # which leaves values in their order
            return ()
    num_values = 1
    for size, step_over in zip(reversed(shape), reversed(stride), strict=True):
        if step_over != num_values:
            return ()
        num_values *= size
    return tuple(found)


_OF_SELF = ("self",)
ALL_EDGES = ("*",)  # as many inputs as the node has edges
_LAYER_NORM_ALONE = NodeOperation(  # without weight and bias
    _normed, ("input", "weight", "result2", "result1"), optional=("weight",)
)


def lacks(node: Any, name: str) -> bool:
    """Whether an operation was given no tensor of that name."""
    try:
        raw = getattr(node, "_raw_saved_" + name)
        return raw.unpack_hook is None and getattr(node, "_saved_" + name) is None
    except RuntimeError:  # freed, or changed in place
        return False


def _without_weight(node: Any) -> NodeOperation | None:
    return _LAYER_NORM_ALONE if lacks(node, "weight") and lacks(node, BIAS) else None


def _batch_norm_of(eps: str) -> NodeOperation:
    """Of a node with that name for its eps."""
    evaluated = NodeOperation(
        _batch_norm_evaluated, ("input", "weight", BIAS, *RUNNING), (eps,), optional=("weight",)
    )
    return NodeOperation(
        _batch_norm,
        ("input", "weight", BIAS, "result1", "result2"),
        (eps,),
        optional=("weight",),
        instead=lambda node: None if node._saved_training else evaluated,
    )


_NODES: dict[str, NodeOperation] = {
    "MulBackward0": NodeOperation(torch.mul, ("self", "other")),
    "DivBackward0": NodeOperation(torch.div, ("self", "other")),
    "AddBackward0": NodeOperation(_add, (None, None), ("alpha",), SCALAR, by_layout=True),
    "SubBackward0": NodeOperation(_sub, (None, None), ("alpha",), SCALAR, by_layout=True),
    "RsubBackward1": NodeOperation(subtract_from, (None,), (), SCALAR),
    "NativeLayerNormBackward0": NodeOperation(
        _layer_norm,
        ("input", "weight", BIAS, "result2"),
        ("normalized_shape",),
        EPS,
        ("weight", BIAS),
        _without_weight,
    ),
    "FusedRmsNormBackward0": NodeOperation(
        _normed, ("input", "weight", "result1"), optional=("weight",)
    ),
    "NativeGroupNormBackward0": NodeOperation(
        _group_norm,
        ("input", "weight", BIAS),
        ("N", "C", "HxW", "group", "eps"),
        optional=("weight",),
    ),
    "NativeBatchNormBackward0": _batch_norm_of("eps"),
    "CudnnBatchNormBackward0": _batch_norm_of("epsilon"),
    "SiluBackward0": NodeOperation(F.silu, _OF_SELF, by_layout=True),
    "GeluBackward0": NodeOperation(_gelu, _OF_SELF, ("approximate",), by_layout=True),
    "MishBackward0": NodeOperation(F.mish, _OF_SELF, by_layout=True),
    "HardswishBackward0": NodeOperation(F.hardswish, _OF_SELF),
    "HardsigmoidBackward0": NodeOperation(F.hardsigmoid, _OF_SELF),
    "LeakyReluBackward0": NodeOperation(F.leaky_relu, _OF_SELF, ("negative_slope",)),
    "LeakyReluBackward1": NodeOperation(F.leaky_relu, (None,), ("negative_slope",)),
    "EluBackward0": NodeOperation(
        _elu, _OF_SELF, ("alpha", "scale", "input_scale"), by_layout=True
    ),
    "EluBackward1": NodeOperation(_elu, (None,), ("alpha", "scale", "input_scale"), by_layout=True),
    "SoftplusBackward0": NodeOperation(F.softplus, _OF_SELF, ("beta", "threshold"), by_layout=True),
    "LogSigmoidBackward0": NodeOperation(F.logsigmoid, _OF_SELF, by_layout=True),
    "GluBackward0": NodeOperation(_glu, _OF_SELF, ("dim",), by_layout=True),
    "PowBackward0": NodeOperation(torch.pow, _OF_SELF, ("exponent",), by_layout=True),
    "ErfBackward0": NodeOperation(torch.erf, _OF_SELF, by_layout=True),
    "CosBackward0": NodeOperation(torch.cos, _OF_SELF, by_layout=True),
    "SinBackward0": NodeOperation(torch.sin, _OF_SELF, by_layout=True),
    "LogBackward0": NodeOperation(torch.log, _OF_SELF, by_layout=True),
    "AbsBackward0": NodeOperation(torch.abs, _OF_SELF),
    "ClampBackward1": NodeOperation(_clamp, _OF_SELF, ("min", "max")),
    "HardtanhBackward0": NodeOperation(F.hardtanh, _OF_SELF, ("min_val", "max_val")),
    "TanhBackward0": NodeOperation(torch.tanh, by_layout=True),
    "SigmoidBackward0": NodeOperation(torch.sigmoid, by_layout=True),
    "ReluBackward0": NodeOperation(torch.relu),
    "ExpBackward0": NodeOperation(torch.exp, by_layout=True),
    "SqrtBackward0": NodeOperation(torch.sqrt),
    "RsqrtBackward0": NodeOperation(torch.rsqrt, by_layout=True),
    "ReciprocalBackward0": NodeOperation(torch.reciprocal),
    "NegBackward0": NodeOperation(torch.neg),
    "LogSoftmaxBackward0": NodeOperation(_log_softmax, (None,), ("dim", DTYPE)),
    "ToCopyBackward0": NodeOperation(_cast, (None,), (DTYPE,)),
    "WhereBackward0": NodeOperation(_where, (None, None, "condition")),
    "NativeDropoutBackward0": NodeOperation(_dropped_out, (None, "result1"), ("p",)),
    "CatBackward0": NodeOperation(_cat, ALL_EDGES, ("dim",)),
    "StackBackward0": NodeOperation(_stack, ALL_EDGES, ("dim",)),
    "AliasBackward0": NodeOperation(_alias),
    "CloneBackward0": NodeOperation(torch.clone),
    "ViewBackward0": NodeOperation(torch.reshape, (None,), (SHAPE,)),
    "UnsafeViewBackward0": NodeOperation(torch.reshape, (None,), (SHAPE,)),
    "ReshapeAliasBackward0": NodeOperation(torch.reshape, (None,), (SHAPE,)),
    "RepeatBackward0": NodeOperation(torch.Tensor.repeat, (None,), ("repeats",)),
    "ExpandBackward0": NodeOperation(torch.Tensor.expand, (None,), (SHAPE,)),
    "SqueezeBackward0": NodeOperation(torch.reshape, (None,), (SHAPE,)),
    "SqueezeBackward1": NodeOperation(torch.reshape, (None,), (SHAPE,)),
    "UnsqueezeBackward0": NodeOperation(torch.unsqueeze, (None,), ("dim",)),
    "TBackward0": NodeOperation(torch.t),
    "TransposeBackward0": NodeOperation(torch.transpose, (None,), ("dim0", "dim1")),
    "PermuteBackward0": NodeOperation(torch.permute, (None,), ("dims",)),
    "SelectBackward0": NodeOperation(torch.select, (None,), ("dim", "index")),
    "SliceBackward0": NodeOperation(_slice, (None,), ("dim", "start", "end", "step")),
    "SplitBackward0": NodeOperation(_split, (None,), ("split_size", "dim", NUMBER)),
    "UnsafeSplitBackward0": NodeOperation(_split, (None,), ("split_size", "dim", NUMBER)),
    "SplitWithSizesBackward0": NodeOperation(_split_sizes, (None,), ("split_sizes", "dim", NUMBER)),
    "UnbindBackward0": NodeOperation(_unbind, (None,), ("dim", NUMBER)),
}

_by_type: dict[type, NodeOperation | None] = {}  # torch's own types of nodes
_of_functions: dict[type, Operation] = {}  # by the class of an `autograd.Function`


def operation_of(node: Any) -> NodeOperation | None:
    """What a node computed; None: it is not in the table, or a function (`function_of`)."""
    kind = type(node)
    try:
        return _by_type[kind]
    except KeyError:
        pass
    if isinstance(node, torch._C._FunctionBase):  # a forward pass may define a type each time
        return None
    found = _by_type[kind] = _NODES.get(kind.__name__)
    return found


def function_of(node: Any) -> Operation | None:
    """What computes the output of an `autograd.Function` from what it saved; None: not known.

    The context of its forward pass may say so itself, in an attribute `replayed_by`.
    """
    if not isinstance(node, torch._C._FunctionBase):
        return None
    own: Operation | None = getattr(node, "replayed_by", None)
    return own or _of_functions.get(getattr(type(node), "_forward_cls", type(None)))


def add_function(function: type, compute: Callable[..., torch.Tensor]) -> None:
    """Says how the output of an `autograd.Function` is computed from the tensors that it saved.

    Its output is compared with what was computed, byte for byte, before anything relies on it.

    Args:
        function: with one output.
        compute: gets the tensors that `forward` gave to `save_for_backward`, in their order, and
            returns the output; deterministic and cheap.
    """
    _of_functions[function] = compute


def constant_of(node: Any, name: str) -> Any:
    """A constant of a node, hashable.

    Raises:
        AttributeError: the node has none of that name.
    """
    value = getattr(node, "_saved_" + name)
    if isinstance(value, list | tuple):
        return tuple(_signed(one) for one in value)
    return _signed(value)


def _signed(value: Any) -> Any:
    if type(value) is int and value >= _LARGEST_DIMENSION:
        return value - 2 * _LARGEST_DIMENSION
    return value
