# SPDX-License-Identifier: Apache-2.0
"""Nodes of autograd whose operation can be run again for little: `operation_of`, `add_function`.

A table: for each type of node the operation, the saved tensors that are its inputs, and the
attributes that are its constants. Recipes are made of it; nothing here looks at bytes.

What is not in the table is not replayed: operations that draw random numbers, that communicate, or
that cost as much as a matrix product; softmax, whose input nothing saves. Nor does anything save
that of log-softmax, but logits of half its bytes may be there: see Note [Results of modules].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.offload.activations.saved import replay_operations as run
from megatron.offload.activations.saved.recipe import Operation

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
        listed: name of a list of saved tensors, which are inputs behind the others.
        by_layout: a CPU rounds some values otherwise than others, and which these are depends on
            how the inputs lie in memory. Not so where the constant is a factor of 1.
    """

    operation: Operation
    inputs: tuple[str | None, ...] = (None,)
    constants: tuple[str, ...] = ()
    missing: str = ""
    optional: tuple[str, ...] = ()
    instead: Callable[[Any], NodeOperation | None] = lambda _: None
    listed: str = ""
    by_layout: bool = False


SHAPE, DTYPE, NUMBER = "shape", "dtype", "number"
BIAS = "bias"  # that the node saves, or that of its edge, or a frozen one that a module has
EPS, SCALAR = "eps", "scalar"


_OF_SELF = ("self",)
ALL_EDGES = ("*",)  # as many inputs as the node has edges
_LAYER_NORM_ALONE = NodeOperation(  # without weight and bias
    run.normed, ("input", "weight", "result2", "result1"), optional=("weight",)
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
        run.batch_norm_evaluated,
        ("input", "weight", BIAS, "running_mean", "running_var"),
        (eps,),
        optional=("weight",),
    )
    return NodeOperation(
        run.batch_norm,
        ("input", "weight", BIAS, "result1", "result2"),
        (eps,),
        optional=("weight",),
        instead=lambda node: None if node._saved_training else evaluated,
    )


_NODES: dict[str, NodeOperation] = {
    "MulBackward0": NodeOperation(torch.mul, ("self", "other")),
    "MulBackward1": NodeOperation(torch.mul, (None,), ("other",)),
    "DivBackward0": NodeOperation(torch.div, ("self", "other")),
    "AddBackward0": NodeOperation(run.add, (None, None), ("alpha",), SCALAR, by_layout=True),
    "SubBackward0": NodeOperation(run.sub, (None, None), ("alpha",), SCALAR, by_layout=True),
    "RsubBackward1": NodeOperation(run.subtract_from, (None,), (), SCALAR),
    "NativeLayerNormBackward0": NodeOperation(
        run.layer_norm,
        ("input", "weight", BIAS, "result2"),
        ("normalized_shape",),
        EPS,
        ("weight", BIAS),
        _without_weight,
    ),
    "FusedRmsNormBackward0": NodeOperation(
        run.normed, ("input", "weight", "result1"), optional=("weight",)
    ),
    "NativeGroupNormBackward0": NodeOperation(
        run.group_norm,
        ("input", "weight", BIAS),
        ("N", "C", "HxW", "group", "eps"),
        optional=("weight",),
    ),
    "NativeBatchNormBackward0": _batch_norm_of("eps"),
    "CudnnBatchNormBackward0": _batch_norm_of("epsilon"),
    "SiluBackward0": NodeOperation(F.silu, _OF_SELF, by_layout=True),
    "GeluBackward0": NodeOperation(run.gelu, _OF_SELF, ("approximate",), by_layout=True),
    "MishBackward0": NodeOperation(F.mish, _OF_SELF, by_layout=True),
    "HardswishBackward0": NodeOperation(F.hardswish, _OF_SELF),
    "HardsigmoidBackward0": NodeOperation(F.hardsigmoid, _OF_SELF),
    "LeakyReluBackward0": NodeOperation(F.leaky_relu, _OF_SELF, ("negative_slope",)),
    "LeakyReluBackward1": NodeOperation(F.leaky_relu, (None,), ("negative_slope",)),
    "EluBackward0": NodeOperation(
        run.elu, _OF_SELF, ("alpha", "scale", "input_scale"), by_layout=True
    ),
    "EluBackward1": NodeOperation(
        run.elu, (None,), ("alpha", "scale", "input_scale"), by_layout=True
    ),
    "SoftplusBackward0": NodeOperation(F.softplus, _OF_SELF, ("beta", "threshold"), by_layout=True),
    "LogSigmoidBackward0": NodeOperation(F.logsigmoid, _OF_SELF, by_layout=True),
    "GluBackward0": NodeOperation(run.glu, _OF_SELF, ("dim",), by_layout=True),
    "PowBackward0": NodeOperation(torch.pow, _OF_SELF, ("exponent",), by_layout=True),
    "ErfBackward0": NodeOperation(torch.erf, _OF_SELF, by_layout=True),
    "CosBackward0": NodeOperation(torch.cos, _OF_SELF, by_layout=True),
    "SinBackward0": NodeOperation(torch.sin, _OF_SELF, by_layout=True),
    "LogBackward0": NodeOperation(torch.log, _OF_SELF, by_layout=True),
    "AbsBackward0": NodeOperation(torch.abs, _OF_SELF),
    "ClampBackward1": NodeOperation(run.clamp, _OF_SELF, ("min", "max")),
    "HardtanhBackward0": NodeOperation(F.hardtanh, _OF_SELF, ("min_val", "max_val")),
    "TanhBackward0": NodeOperation(torch.tanh, by_layout=True),
    "SigmoidBackward0": NodeOperation(torch.sigmoid, by_layout=True),
    "ReluBackward0": NodeOperation(torch.relu),
    "ExpBackward0": NodeOperation(torch.exp, by_layout=True),
    "SqrtBackward0": NodeOperation(torch.sqrt),
    "RsqrtBackward0": NodeOperation(torch.rsqrt, by_layout=True),
    "ReciprocalBackward0": NodeOperation(torch.reciprocal),
    "NegBackward0": NodeOperation(torch.neg),
    "LogSoftmaxBackward0": NodeOperation(run.log_softmax, (None,), ("dim", DTYPE)),
    "ToCopyBackward0": NodeOperation(run.cast, (None,), (DTYPE,)),
    "WhereBackward0": NodeOperation(run.where, (None, None, "condition")),
    "NativeDropoutBackward0": NodeOperation(run.dropped_out, (None, "result1"), ("p",)),
    "CatBackward0": NodeOperation(run.cat, ALL_EDGES, ("dim",)),
    "StackBackward0": NodeOperation(run.stack, ALL_EDGES, ("dim",)),
    "IndexBackward0": NodeOperation(run.index, listed="indices"),
    "IndexSelectBackward0": NodeOperation(run.index_select, (None, "index"), ("dim",)),
    "GatherBackward0": NodeOperation(run.gather, ("self", "index"), ("dim",)),
    "AliasBackward0": NodeOperation(run.alias),
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
    "SliceBackward0": NodeOperation(run.slice_of, (None,), ("dim", "start", "end", "step")),
    "SplitBackward0": NodeOperation(run.split, (None,), ("split_size", "dim", NUMBER)),
    "UnsafeSplitBackward0": NodeOperation(run.split, (None,), ("split_size", "dim", NUMBER)),
    "SplitWithSizesBackward0": NodeOperation(
        run.split_sizes, (None,), ("split_sizes", "dim", NUMBER)
    ),
    "UnbindBackward0": NodeOperation(run.unbind, (None,), ("dim", NUMBER)),
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


def edges_of(node: Any, operation: NodeOperation, number: int) -> tuple[Any, ...]:
    """The edges of a node that are inputs of its operation, which takes all that it is given.

    A cache that is empty concatenates nothing with the first keys and values. That has no edge; it
    is seen by the others, which fill the result. One of these may be empty and have one dimension,
    whatever the others have.
    """
    edges: tuple[Any, ...] = node.next_functions
    if operation.operation is not run.cat:
        return edges
    dim, shape = _constant_of(node, number, "dim"), shape_of((node, number))
    filled = tuple(edge for edge in edges if edge[0] is not None)
    shapes = (one for edge in filled if len(one := shape_of(edge)) == len(shape))
    is_full = len(filled) < len(edges) and sum(one[dim] for one in shapes) == shape[dim]
    return filled if is_full else edges


def shape_of(edge: tuple[Any, int]) -> tuple[int, ...]:
    """The shape of a result of a node."""
    node, number = edge
    return tuple(node._input_metadata[number].shape)


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


def constants_of(edge: tuple[Any, int], operation: NodeOperation) -> tuple[Any, ...]:
    """Those of an operation that made a result of a node, hashable."""
    return tuple(_constant_of(*edge, name) for name in operation.constants)


def _constant_of(node: Any, number: int, name: str) -> Any:
    if name == NUMBER:
        return number
    if name == DTYPE:
        return node._input_metadata[number].dtype
    if name == SHAPE:
        return shape_of((node, number))
    value = getattr(node, "_saved_" + name)
    if isinstance(value, list | tuple):
        return tuple(_signed(one) for one in value)
    return _signed(value)


def _signed(value: Any) -> Any:
    if type(value) is int and value >= _LARGEST_DIMENSION:
        return value - 2 * _LARGEST_DIMENSION
    return value
