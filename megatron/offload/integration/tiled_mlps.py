# SPDX-License-Identifier: Apache-2.0
"""The MLPs of models and their norms, over tiles of tokens: `TiledMlps`, for `tiled_mlp`.

The door makes one. It finds MLPs by their names and by what they are made of, and takes the place
of their `forward` in training; it refuses what its trial shows to be none. Then
`ops/tiled_mlp.py` computes. Megatron's models have their own: `megatron/tiled_mlps.py`.

Note [What is an MLP]
A module that the model calls `mlp` or the like, of which everything that has parameters is a linear
layer or a norm over the last dimension, and two linear layers at least. So every token is by
itself, and a tile gives what the whole gives. To be sure, some of the first tokens that a module
sees are computed once with the tokens around them and once without. And once as in training, where
it has buffers: what keeps running statistics takes others of each tile. The module is left as it
was before.

Note [Norms]
A norm that a model writes in Python, as the RMS norms of transformers are, makes up to seven fp32
tensors of all tokens in backward: with MLPs over tiles they are the peak of a layer that runs
again. They run over tiles of as many values; one that cannot is left as it is. Norms of torch
compute in one kernel. Where `torch.compile` traces a norm its kernels make no such tensors either.

Note [ZeRO-3]
DeepSpeed gathers the parameters of a module in hooks around its forward, and lets go of them. Those
of the linear layers would gather for each tile, and ranks whose sequences have other numbers of
tiles would wait for each other for ever. So an MLP is a leaf for it: it gathers all of the MLP's
parameters around the whole, in forward and in backward. That has to be said before
`deepspeed.initialize`, which puts the hooks there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.activations.saved.autograd_graph import nodes_behind
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.hook import outside_of_graphs
from megatron.offload.integration.own_attributes import put
from megatron.offload.integration.replaced_forwards import ReplacedForwards
from megatron.offload.integration.torch.attribute_snapshot import AttributeSnapshot
from megatron.offload.integration.torch.buffer_snapshot import BufferSnapshot
from megatron.offload.integration.torch.noted_tensor import Changes, version_of
from megatron.offload.ops.tiled_mlp import (
    Tiles,
    draws_as_before,
    in_tiles,
    nothing_moves,
    tile_tokens_of,
    tiled,
)

_NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "ffwd", "DenseReluDense")
_LINEAR = ("Linear", "Conv1D")  # the ends of names of classes
_SETTING = "tiled_mlp"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INSIDE = ("_parameters", "_modules")
_PROBED_TOKENS = 64  # all together, and half of them alone
_OF_TORCH = (
    *(torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm),
    *(torch.nn.modules.batchnorm._NormBase,),
)
_TOLERANCE = 0.05  # of the largest value: products of other shapes round differently


class TiledMlps(ReplacedForwards):
    """Runs the MLPs of models over tiles.

    Args:
        models: plain or wrapped.
        tokens: most of a tile; None: as many as suit the model.

    Raises:
        ConfigurationError: there is no MLP in them.
    """

    def __init__(self, models: Sequence[torch.nn.Module], tokens: int | None) -> None:
        found = {module: name for model in models for name, module in _mlps(model)}
        if not found:
            raise ConfigurationError(
                f"{_SETTING} is for models with MLPs of linear layers, and "
                f"{' and '.join(type(model).__name__ for model in models)} has none that can be "
                f"told; drop {_SETTING}"
            )
        mlps = [_Mlp(module, name, tokens) for module, name in found.items()]
        if "deepspeed" in sys.modules:
            for module in found:
                _make_leaf(module)
        inside = {one for module in found for one in module.modules()}
        norms = {one: name for model in models for name, one in _norms(model) if one not in inside}
        widths = {one: next(one.parameters()).numel() for one in norms}
        hidden = max(widths.values(), default=0)
        values = (tokens or tile_tokens_of(hidden)) * hidden
        super().__init__(
            [
                *mlps,
                *(_Norm(one, norms[one], values // each, each) for one, each in widths.items()),
            ]
        )


class _Mlp:
    """One module, and its own `forward`."""

    def __init__(self, module: torch.nn.Module, name: str, tokens: int | None) -> None:
        self.module = module
        self._name = name
        self._tokens = tokens
        self._own: Callable[..., Any] = module.forward
        # By their owners: FSDP has views of a larger tensor in their place while layers run.
        self._places = [
            (owner, one) for owner in module.modules() for one in owner._parameters if one
        ]
        self._changed = Changes("attribute")
        # With which modules it was checked, in training or not.
        self._checked: dict[bool, tuple[torch.nn.Module, ...]] = {}

    @outside_of_graphs("an MLP runs over tiles", "leave it out, or leave out tiled_mlp")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, over tiles where there is more than one."""
        # A checkpoint may run the first pass without gradients, and has to get the same of both.
        trains = torch.is_grad_enabled() or self.module.training
        if not trains or len(args) != 1 or kwargs:
            return self._own(*args, **kwargs)
        (x,) = args
        tokens = x.numel() // max(x.shape[-1], 1)
        tile_tokens = self._tokens or tile_tokens_of(x.shape[-1])
        if tokens <= tile_tokens:
            return self._own(x)
        parameters = self._parameters()
        self._check(x)
        modules, training = tuple(self.module.modules()), self.module.training
        if self._checked.get(training) != modules:
            some = x.detach().reshape(1, -1, x.shape[-1])[:, :_PROBED_TOKENS]
            if self._check_same(some):
                self._checked[training] = modules
        return self._tiled(x, parameters, Tiles(tile_tokens))

    def _tiled(
        self, x: torch.Tensor, parameters: Sequence[torch.Tensor], tiles: Tiles
    ) -> torch.Tensor:
        before = AttributeSnapshot(self.module, self._changed)
        result = tiled(self._of_tile, x, parameters, tiles, before.restored)
        before.keep_changed()
        return result

    def _of_tile(self, x: torch.Tensor) -> Any:
        before = version_of(x)
        result = self._own(x)
        if version_of(x) != before:  # backward would begin with what forward has left
            self._refuse("changes its input in place")
        # With a graph: the trial, and backward, since a module may be given more than in the trial.
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            known = [x, *self._parameters()]
            if any(not _is_one_of(leaf, known) for leaf in _wants_gradient(result, known)):
                self._refuse("uses parameters that are not its own, whose gradients would be lost")
        return result

    def _parameters(self) -> list[torch.Tensor]:
        """As the layers see them now, each once."""
        found = (getattr(owner, name) for owner, name in self._present())
        return list({id(one): one for one in found}.values())

    def _present(self) -> list[tuple[torch.nn.Module, str]]:
        """Where there are parameters now: adapters may have come since."""
        now = [(owner, one) for owner in self.module.modules() for one in owner._parameters if one]
        places = dict.fromkeys([*self._places, *now])
        return [one for one in places if isinstance(getattr(*one, None), torch.Tensor)]

    def _check(self, x: torch.Tensor) -> None:
        """Raises ConfigurationError if something would hear of each tile."""
        if type(x) is not torch.Tensor or not x.dtype.is_floating_point:
            self._refuse(f"gets a {type(x).__name__}, not a plain tensor")
        if _is_gathered_by_layers(self.module):
            self._refuse(
                "has parameters that DeepSpeed's ZeRO-3 gathers for each linear layer; import "
                "deepspeed and call offload_activations before deepspeed.initialize, or before "
                "the Trainer call deepspeed.utils.set_z3_leaf_modules(model, "
                f"[{type(self.module).__name__}])"
            )
        for name, module in self.module.named_modules():
            inner = f"{self._name}.{name}".rstrip(".")
            if name and any(getattr(module, hooks) for hooks in _HOOKS):
                self._refuse(f"has hooks on {inner}, which would be called for each tile")
            if type(module).__module__.startswith("transformer_engine."):
                self._refuse(f"computes {inner} with Transformer Engine, which was not tried")
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks:
                self._refuse(f"has a hook on the gradient of {name}, which would see each tile's")

    def _check_same(self, some: torch.Tensor) -> bool:
        """Whether all could be compared.

        Raises:
            ConfigurationError: tokens are not independent, or gradients would be lost.
        """
        some = some.clone()  # the module may write to it
        # From the middle: a token may take from those before it, from those behind, or from its
        # place.
        tokens, begin = some.shape[1] // 2, (some.shape[1] + 2) // 4
        part = some[:, begin : begin + tokens].clone()
        self._check_buffers(some)
        # Dropout would tell the two apart, and without gradients there are no leaves to look at.
        with torch.enable_grad(), self._as_it_is(), _evaluated(self.module):
            before = {id(one) for _, one in self._results()}
            together, alone = self._of_tile(some), self._of_tile(part)
            for name, one in self._results():
                if id(one) not in before:
                    self._refuse(f"keeps {name}, a result, and would keep the last tile's alone")
        if not isinstance(alone, torch.Tensor):
            self._refuse(f"returns a {type(alone).__name__}, not a tensor")
        together = together[:, begin : begin + tokens]
        if alone.shape[:2] != (1, tokens) or alone.shape != together.shape:
            self._refuse(f"returns {tuple(alone.shape)} for {tokens} tokens")
        differing, values = (alone - together).detach().abs(), together.detach().abs()
        is_known = differing.isfinite() & values.isfinite()  # what overflows says nothing
        off, most = (one.where(is_known, 0).max() for one in (differing, values))
        if not bool(off <= _TOLERANCE * most):
            self._refuse("gives a token another result where others are beside it")
        return bool(is_known.all())

    def _results(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What attributes hold that a loss may be made of."""
        for prefix, module in self.module.named_modules():
            own = {name: one for name, one in vars(module).items() if name not in _INSIDE}
            for name, value in own.items():
                for one in tree_leaves(value):
                    if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                        yield f"{prefix}.{name}".lstrip("."), one

    def _check_buffers(self, some: torch.Tensor) -> None:
        """Raises ConfigurationError if a pass as in training changes buffers."""
        own = dict(self.module.named_buffers())
        if not own or not self.module.training:
            return
        with torch.no_grad(), self._as_it_is(), draws_as_before(some):
            copies = dict(self.module.named_buffers())
            versions = {name: version_of(one) for name, one in copies.items()}
            self._own(some.clone())
            for name, now in self.module.named_buffers():
                is_same = now is copies.get(name) and version_of(now) == versions[name]
                if not is_same and not (name in own and torch.equal(now, own[name])):
                    self._refuse(f"changes {name} in each pass, and would for each tile")

    @contextlib.contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """A context whose passes leave the module as it was, and what they save where it is."""
        attributes = AttributeSnapshot(self.module, Changes("attribute"))
        buffers = BufferSnapshot(self.module.modules())
        with nothing_moves(), attributes.restored(), buffers.restored():
            yield

    def _refuse(self, why: str) -> None:
        raise ConfigurationError(
            f"{_SETTING} runs an MLP over tiles of tokens, and {self._name} "
            f"({type(self.module).__name__}) {why}; drop {_SETTING}"
        )


class _Norm(_Mlp):
    """A norm; see Note [Norms].

    Args:
        module: it.
        name: of it.
        tokens: most of a tile.
        width: values of a token that it takes together.
    """

    def __init__(self, module: torch.nn.Module, name: str, tokens: int, width: int) -> None:
        super().__init__(module, name, tokens)
        self._tiles = Tiles(tokens, replayed_by=self._again)
        self._width = width
        self._is_apart: bool | None = None  # each token by itself; None: it has not run yet

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, over tiles where there is more than one."""
        trains = torch.is_grad_enabled() or self.module.training
        is_other = not trains or len(args) != 1 or kwargs or _is_divided(self.module)
        if torch.compiler.is_compiling() or is_other:
            return self._own(*args, **kwargs)
        (x,) = args
        if x.shape[-1] != self._width or x.numel() <= self._tiles.tokens * self._width:
            return self._own(x)
        parameters = self._parameters()
        try:
            self._check(x)
            if self._is_apart is None:
                some = x.detach().reshape(1, -1, self._width)[:, :_PROBED_TOKENS]
                self._is_apart = self._check_same(some) or None
        except Exception:  # of a norm over another dimension, which takes no such part
            self._is_apart = False
        if not self._is_apart:
            return self._own(x)
        return self._tiled(x, parameters, self._tiles)

    def _again(self, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """The result of forward, with the parameters that it had."""
        with contextlib.ExitStack() as stack:
            for (owner, name), given in zip(self._present(), parameters, strict=True):
                stack.callback(put(owner, name, given))
            with torch.no_grad(), nothing_moves():
                return in_tiles(self._own, x, self._tiles)


def _make_leaf(module: torch.nn.Module) -> None:
    """See Note [ZeRO-3]."""
    from deepspeed.utils import set_z3_leaf_module

    if not _is_gathered_by_layers(module):
        set_z3_leaf_module(module, True)


def _is_gathered_by_layers(module: torch.nn.Module) -> bool:
    """Whether modules within have hooks of ZeRO-3."""
    inner = (one for one in module.modules() if one is not module)
    hooks = (hook for one in inner for hook in one._forward_pre_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)


def _is_divided(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 divides its parameters among ranks."""
    return any(hasattr(one, "ds_id") for one in module.parameters())


def _norms(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Norms over the last dimension that are written in Python."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "Norm" not in kind or isinstance(module, _OF_TORCH) or any(module.children()):
            continue
        if _is_divided(module):
            continue
        sizes = {tuple(one.shape) for one in module.parameters()}
        if len(sizes) == 1 and len(*sizes) == 1:
            yield name, module


def _mlps(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost modules that are MLPs; see Note [What is an MLP]."""
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or name.rpartition(".")[2] not in _NAMES or not _is_mlp(module):
            continue
        inside.update(module.modules())
        yield name, module


def _is_mlp(module: torch.nn.Module) -> bool:
    num_linear = 0
    for one in module.modules():
        if not any(True for _ in one.parameters(recurse=False)):
            continue
        kind = type(one).__name__
        if kind.endswith(_LINEAR):
            num_linear += 1
        elif "Norm" not in kind or "Batch" in kind or "Group" in kind or "Instance" in kind:
            return False
    return num_linear >= 2


def _wants_gradient(
    result: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The leaves that backward from `result` comes to, but not through one of `parameters`."""
    for node in nodes_behind([result.grad_fn], [one.grad_fn for one in parameters]):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


@contextlib.contextmanager
def _evaluated(module: torch.nn.Module) -> Iterator[None]:
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True


def _is_one_of(tensor: Any, parameters: Sequence[torch.Tensor]) -> bool:
    return any(tensor is one for one in parameters)
