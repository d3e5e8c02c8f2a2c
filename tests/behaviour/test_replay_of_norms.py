# SPDX-License-Identifier: Apache-2.0
"""Norms that need no eps to be computed again: they have no weight, or are fused RMS norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.offload import ChangedInPlaceError, OffloadEngine, offload_activations
from megatron.offload.activations.saved.recipe_search import RecipeSearch
from megatron.offload.activations.saved.replayable_nodes import lacks, operation_of
from tests.behaviour.test_replay import (
    SHAPE,
    WAYS,
    between,
    engine,
    leaf,
    make_engine,
    train,
    weights,
)

assert make_engine and engine  # fixtures
MakeEngine = Callable[..., OffloadEngine]
ONE = SHAPE[0] * 64  # values of a norm's result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_no_module_says_the_eps_of_a_norm_without_weight(make_engine, dtype, way):
    """Two norms have two, and other ones in each step."""
    calls: list[None] = []

    def twice(x: Tensor) -> Tensor:
        calls.append(None)
        eps = 10.0 ** -len(calls)
        return F.layer_norm(F.silu(F.layer_norm(x, [64], eps=eps)), [64], eps=10 * eps)

    engine = make_engine()
    ours = train(engine, way, between(twice), lambda: weights(dtype), num_steps=6)
    calls.clear()
    plain = train(None, way, between(twice), lambda: weights(dtype), num_steps=6)
    assert all(map(torch.equal, ours, plain))
    assert engine.statistics.replayed_bytes >= 3 * ONE * dtype.itemsize


@pytest.mark.parametrize("way", WAYS)
def test_a_norm_over_several_dimensions(make_engine, way):
    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.view(2, 4, 8, 8), [8, 8]).view(x.shape)

    engine = make_engine()
    ours = train(engine, way, between(norm), weights)
    assert all(map(torch.equal, ours, train(None, way, between(norm), weights)))
    assert engine.statistics.replayed_bytes == 4 * ONE


@pytest.mark.parametrize("way", WAYS)
def test_where_statistics_are_rounded_a_norm_is_saved(make_engine, way):
    """Those of zeros are not changed by it, and zeros are all that is compared."""
    factors: list[float] = []

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        factor = 0.0 if len(factors) < 3 else 1.0
        factors.append(factor)
        return F.layer_norm(factor * x @ first, [64]) @ second

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        factors.clear()
        return train(engine, way, layer, lambda: weights(torch.bfloat16), num_steps=5)

    assert all(map(torch.equal, gradients(make_engine()), gradients(None)))


@pytest.mark.parametrize("way", WAYS)
def test_a_norm_with_a_bias_alone_is_saved(make_engine, way):
    """A bias that is zero at first does not show in the bytes."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(64))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.calls += 1
                if self.calls > 3:
                    self.bias += 1
            return F.layer_norm(x, [64], None, self.bias)

        calls = 0

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        norm = Biased()
        return train(engine, way, between(norm), weights, norm, num_steps=5)

    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    assert engine.statistics.replayed_bytes == 0


def kernel(x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """In the order in which accelerators compute it."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    result = x.float() * rstd
    return (result if weight is None else weight.float() * result).to(x.dtype), rstd


def backward_kernel(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: Any
) -> tuple[Tensor, Tensor | None]:
    gradient, normed = gradient.float(), x.float() * rstd
    slope = gradient if weight is None else gradient * weight.float()
    found = rstd * (slope - normed * (slope * normed).mean(-1, keepdim=True))
    return found.to(x.dtype), None if weight is None else (gradient * normed).sum(0).to(x.dtype)


@pytest.fixture
def fused_rms_norm() -> Iterator[None]:
    """Torch has a kernel for RMS norms, and autograd a node, which it has on accelerators only."""
    library = torch.library.Library("aten", "IMPL")
    key = {"cpu": "CPU"}.get(torch.empty(0).device.type, "PrivateUse1")
    library.impl("_fused_rms_norm", kernel, key)
    library.impl("_fused_rms_norm_backward", backward_kernel, key)
    yield
    library._destroy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.usefixtures("fused_rms_norm")
def test_a_fused_rms_norm_is_computed_again(make_engine, has_weight, dtype, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        torch.manual_seed(7)
        norm = nn.RMSNorm(64, elementwise_affine=has_weight).to(dtype)
        if has_weight:
            nn.init.normal_(norm.weight)
        norm.eps = 1e-3
        return train(engine, way, between(norm), lambda: weights(dtype), norm)

    node = F.rms_norm(torch.ones(2, 64, requires_grad=True), [64], eps=1e-3).grad_fn
    assert type(node).__name__ == "FusedRmsNormBackward0" and operation_of(node)
    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    assert engine.statistics.replayed_bytes == ONE * dtype.itemsize


def test_a_norm_without_weight_makes_no_negative_zero(make_engine):
    """What is masked is -0 where it was negative; a CPU adds a bias of 0."""
    engine, masks = make_engine(), [torch.ones(8, 1)] * 3 + [torch.arange(8.0).view(8, 1) % 2] * 9
    steps: list[int] = []

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = (x @ first) * masks[len(steps) % len(masks)]
        steps.append(0)
        return F.layer_norm(h, (64,)) @ second

    plain = train(None, "context", layer, weights, num_steps=12)
    assert all(map(torch.equal, train(engine, "context", layer, weights, num_steps=12), plain))
    assert engine.statistics.replayed_bytes
    h = torch.tensor([[0.0, -0.0]], requires_grad=True)
    result = F.layer_norm(h, (2,))
    node: Any = result.grad_fn
    found = (
        operation_of(node)
        .instead(node)
        .operation(h, None, node._saved_result2, node._saved_result1)
    )
    assert torch.equal(found.signbit(), result.signbit())


@pytest.mark.usefixtures("fused_rms_norm")
def test_what_a_norm_divides_by_is_not_taken_for_its_result(engine):
    result, rstd = torch.ops.aten._fused_rms_norm(leaf(), [48], None, 1e-3)
    available = engine.hooks.recipes.available
    for number, one in enumerate((result, rstd)):
        found = RecipeSearch(available, one, fail).target_of((one.grad_fn, number))
        assert (found is None) == (number > 0)


@pytest.mark.usefixtures("fused_rms_norm")
def test_a_weight_that_others_hold_is_not_taken_for_none(engine):
    result = F.rms_norm(leaf(), [48], torch.ones(48), 1e-3)
    node = result.grad_fn
    node._raw_saved_weight.register_hooks(lambda one: one, lambda one: one)
    search = RecipeSearch(engine.hooks.recipes.available, result, fail)
    assert search.target_of((node, 0)) is None


def fail(_: Tensor) -> Any:
    raise AssertionError


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_group_norm_between_convolutions_is_computed_again(make_engine, dtype, layout, way):
    """With its activation function, as in the networks of diffusion models.

    Where channels come last, a CPU's bits depend on the number of threads: the norm is saved.
    """
    size = (2, 16, 6, 6)

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        torch.manual_seed(7)
        norm = nn.GroupNorm(4, 16, eps=1e-2).to(dtype)
        for one in norm.parameters():
            nn.init.normal_(one)

        def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return F.conv2d(F.silu(norm(F.conv2d(x, first))), second)

        def make() -> list[Tensor]:
            x, *kernels = leaf(*size), leaf(16, 16, 1, 1), leaf(16, 16, 1, 1)
            x = x.detach().to(memory_format=layout).requires_grad_()
            return [one.detach().to(dtype).requires_grad_() for one in (x, *kernels)]

        return train(engine, way, block, make, norm)

    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    is_saved = layout is torch.channels_last and torch.empty(0).device.type == "cpu"
    num_replays = 1 if is_saved else 2
    assert engine.statistics.num_replays == num_replays
    assert engine.statistics.replayed_bytes == num_replays * math.prod(size) * dtype.itemsize


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_operand_is_saved_whose_other_part_is(make_engine, is_whole):
    """Or of which all is, as a view: then it is saved once."""

    def layer(x: Tensor, first: Tensor, second: Tensor, both: Tensor) -> Tensor:
        h, parts = x @ first, x[:1] @ both
        shift, gate = (parts, parts.unsqueeze(0)) if is_whole else parts.split(64, -1)
        return (F.silu(h) * gate).squeeze(0) @ second + (F.silu(h) + shift) @ second

    def make() -> list[Tensor]:
        return [*weights(), leaf(48, 64 if is_whole else 128)]

    engine = make_engine()
    ours = train(engine, "context", layer, make)
    assert all(map(torch.equal, ours, train(None, "context", layer, make)))
    assert engine.statistics.unreplayed_by_operation.keys() == {"Mm"}
    if is_whole:
        assert engine.statistics.offloaded_bytes == 4 * (SHAPE[0] * 64 + 64)


class DiTBlock(nn.Module):
    """As diffusion transformers have it: norms without weight, scaled and shifted by a condition.

    There is no attention, of which devices save different things.

    Args:
        wide: norms compute in fp32.
    """

    def __init__(self, size: int, *, wide: bool) -> None:
        super().__init__()
        self.first = nn.LayerNorm(size, eps=1e-6, elementwise_affine=False)
        self.second = nn.LayerNorm(size, eps=1e-5, elementwise_affine=False)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.value, self.out = nn.Linear(size, size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.wide = wide

    def normed(self, norm: nn.LayerNorm, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        one = norm(x.float()).to(x.dtype) if self.wide else norm(x)
        return one * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shifts = self.condition(condition).chunk(6, -1)
        h = self.value(self.normed(self.first, x, *shifts[:2]))  # of each token alone
        x = x + shifts[2].unsqueeze(1) * self.out(h)
        h = self.up(self.normed(self.second, x, *shifts[3:5]))
        return x + shifts[5].unsqueeze(1) * self.down(F.gelu(h, approximate="tanh"))


class DiT(nn.Module):
    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(DiTBlock(64, wide=wide) for _ in range(3))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, condition)
        return x.float().square().mean()


def train_dit(
    dtype: torch.dtype, directory: Path | None, *, wide: bool
) -> tuple[list[Tensor], float]:
    """Gradients of all steps, and the share of what was saved that was computed again."""
    model = DiT(wide=wide).to(dtype)
    handle = None
    if directory is not None:
        handle = offload_activations(model, directory, mode="ssd", min_bytes=4096)
    found = []
    for step in range(4):
        torch.manual_seed(step)
        x, condition = torch.randn(2, 32, 8).to(dtype), torch.randn(2, 64).to(dtype)
        loss = model(x, condition)
        loss.backward()
        found += [loss.detach(), *(one.grad for one in model.parameters())]
        model.zero_grad()
    if handle is None:
        return found, 0.0
    counted = handle.engine.statistics
    replayed = counted.replayed_bytes
    share = replayed / (replayed + sum(counted.unreplayed_by_operation.values()))
    handle.close()
    return found, share


@pytest.mark.parametrize(
    ("dtype", "wide", "least"),
    [
        (torch.float32, False, 0.48),
        (torch.bfloat16, True, 0.59),
        (torch.bfloat16, False, 0.37),  # its norms are saved: their statistics are rounded
    ],
    ids=["fp32", "bf16-norms-in-fp32", "bf16"],
)
def test_diffusion_transformers_have_the_same_bits(tmp_path, dtype, wide, least):
    ours, share = train_dit(dtype, tmp_path, wide=wide)
    plain, _ = train_dit(dtype, None, wide=wide)
    assert all(map(torch.equal, ours, plain))
    assert share >= least


class ConvBlock(nn.Module):
    """A residual block of convolutions, as torchvision and timm have them.

    Where an activation copies its input, a sum that is written in place before is not seen.

    Args:
        activation: of the norms' results, in place or not; a key of `ACTIVATIONS`.
    """

    def __init__(self, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.adds_in_place = activation in SAVE_THEIR_RESULT
        self.first, self.second = (nn.Conv2d(16, 16, 1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.norms[0](self.first(x)))
        h = self.norms[1](self.second(h))
        if self.adds_in_place:
            h += x
        else:
            h = h + x
        return self.activation(h)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_": F.relu_,
    "silu_": lambda x: F.silu(x, inplace=True),
    "relu6_": lambda x: F.relu6(x, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "elu_": lambda x: F.elu(x, inplace=True),
    "swish_": lambda x: x.mul_(x.sigmoid()),  # as timm has it
}

SAVE_THEIR_RESULT = ("relu", "relu_", "leaky_relu_", "elu_")


def train_convolutions(
    blocks: nn.Sequential,
    directory: Path | None,
    *,
    layout: torch.memory_format = torch.contiguous_format,
    change: Callable[[int], None] = lambda step: None,
    num_steps: int = 5,
) -> tuple[list[Tensor], int, dict[str, int]]:
    """Gradients and running statistics of all steps; bytes computed again and not, of the last."""
    handle = None
    if directory is not None:
        handle = offload_activations(blocks, directory, mode="ssd", min_bytes=4096)
    dtype = blocks[0].weight.dtype
    found = []
    for step in range(num_steps):
        change(step)
        torch.manual_seed(step)
        x = torch.randn(4, 16, 8, 8).to(dtype).to(memory_format=layout)
        loss = blocks(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), *(one.grad for one in blocks.parameters() if one.requires_grad)]
        found += [one.clone() for one in blocks.buffers()]
        blocks.zero_grad()
    if handle is None:
        return found, 0, {}
    counted = handle.engine.statistics
    handle.close()
    return found, counted.replayed_bytes, dict(counted.unreplayed_by_operation)


def convolutions(
    activation: str, dtype: torch.dtype = torch.float32, prepare: Callable[[nn.Module], Any] = id
) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = nn.Sequential(
        nn.Conv2d(16, 16, 1, bias=False).to(dtype),
        *(ConvBlock(activation, dtype) for _ in range(3)),
    )
    for one in blocks.modules():
        if isinstance(one, nn.BatchNorm2d):
            for parameter in one.parameters():
                nn.init.normal_(parameter)
            prepare(one)
    return blocks


PREPARE: dict[str, Callable[[nn.Module], Any]] = {
    "trained": id,
    "evaluated": lambda norm: norm.eval(),
    "frozen": lambda norm: norm.requires_grad_(False),
    "frozen-bias": lambda norm: norm.bias.requires_grad_(False),
    "evaluated-and-frozen": lambda norm: norm.eval().requires_grad_(False),
}


@pytest.mark.parametrize(
    ("activation", "prepare", "dtype"),
    [
        *((activation, "trained", torch.float32) for activation in ACTIVATIONS),
        *(("relu_", prepare, torch.float32) for prepare in PREPARE if prepare != "trained"),
        ("relu_", "trained", torch.bfloat16),
        ("silu_", "evaluated-and-frozen", torch.bfloat16),
    ],
    ids=lambda one: str(one).removeprefix("torch."),
)
def test_batch_norms_and_activations_in_place_are_computed_again(
    tmp_path, activation, prepare, dtype
):
    """What convolutions have made is saved, and nothing else."""
    ours, replayed_bytes, unreplayed = train_convolutions(
        convolutions(activation, dtype, PREPARE[prepare]), tmp_path
    )
    plain, _, _ = train_convolutions(convolutions(activation, dtype, PREPARE[prepare]), None)
    assert all(map(torch.equal, ours, plain))
    assert replayed_bytes >= 5 * 4 * 16 * 8 * 8 * dtype.itemsize
    assert unreplayed.keys() <= {"Convolution", "no operation with a gradient"}


def test_a_norm_of_single_values_is_saved(make_engine):
    """There, too, a CPU's bits depend on the number of threads."""

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        norm = nn.BatchNorm1d(64)
        return train(engine, "context", between(lambda x: F.relu(norm(x))), weights, norm)

    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    is_saved = torch.empty(0).device.type == "cpu"
    assert (engine.statistics.replayed_bytes == 0) or not is_saved


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(16, affine=False),
    "group": lambda: nn.GroupNorm(4, 16, affine=False),
    "instance": lambda: nn.InstanceNorm2d(16),
    "instance-with-weight": lambda: nn.InstanceNorm2d(16, affine=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "mixed"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_channels_without_weight_are_computed_again(tmp_path, norm, dtype):
    """And instance norms, whose results are views: what is written into these is saved."""

    def train(directory: Path | None) -> tuple[list[Tensor], int, dict[str, int]]:
        blocks = convolutions("relu", dtype)
        for one in blocks[1:]:
            one.norms = nn.ModuleList(NORMS[norm]() for _ in range(2))
            one.adds_in_place = False
            for parameter in one.norms.parameters():
                nn.init.normal_(parameter)
        return train_convolutions(blocks, directory)

    ours, _, unreplayed = train(tmp_path)
    assert all(map(torch.equal, ours, train(None)[0]))
    assert unreplayed.keys() <= {"Convolution", "no operation with a gradient"}


def test_frozen_group_norms_are_computed_again(tmp_path):
    """As adapters leave them in the networks of diffusion models: their bias has no gradient."""

    def train(directory: Path | None) -> tuple[list[Tensor], int, dict[str, int]]:
        blocks = convolutions("silu_")
        for one in blocks[1:]:
            one.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
            for parameter in one.norms.parameters():
                nn.init.normal_(parameter).requires_grad_(False)
        return train_convolutions(blocks, directory)

    ours, _, unreplayed = train(tmp_path)
    assert all(map(torch.equal, ours, train(None)[0]))
    assert unreplayed.keys() <= {"Convolution", "no operation with a gradient"}


@pytest.mark.parametrize("prepare", ["trained", "evaluated"])
def test_where_channels_come_last_statistics_are_not_computed_again(tmp_path, prepare):
    """Of a CPU their bits depend on the number of threads; those that have run on are there."""

    def train(directory: Path | None) -> tuple[list[Tensor], int, dict[str, int]]:
        layout = torch.channels_last
        blocks = convolutions("relu_", prepare=PREPARE[prepare]).to(memory_format=layout)
        return train_convolutions(blocks, directory, layout=layout)

    ours, replayed_bytes, _ = train(tmp_path)
    assert all(map(torch.equal, ours, train(None)[0]))
    is_replayed = prepare == "evaluated" or torch.empty(0).device.type != "cpu"
    assert (replayed_bytes > 0) == is_replayed


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("activation", ["relu", "relu_", "silu_", "elu_"])
def test_what_is_written_over_unseen_is_not_computed_again(tmp_path, activation, behind):
    """From the fourth step on, when nothing is compared any more, before an activation or behind.

    Behind one there are writes that do not show in the bytes before; if it saves its result, they
    are autograd's error. Before one that copies its input, or is not in place, only a sample shows
    a write.
    """
    made = ACTIVATIONS[activation]

    def train(directory: Path | None) -> list[Tensor]:
        steps: list[int] = []

        def write(x: Tensor) -> Tensor:
            factor = 2 if steps[-1] >= 3 else 1
            with torch.no_grad():
                return x.mul_(factor) if behind or factor > 1 else x

        blocks = convolutions(activation)
        blocks[2].activation = lambda x: write(made(x)) if behind else made(write(x))
        return train_convolutions(blocks, directory, change=steps.append, num_steps=16)[0]

    if behind and activation != "silu_":
        for directory in (None, tmp_path):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                train(directory)
    elif not behind and activation in ("relu", "silu_"):
        with pytest.raises(ChangedInPlaceError, match="behind autograd's back"):
            train(tmp_path)
    else:
        assert all(map(torch.equal, train(tmp_path), train(None)))


class Normed(nn.Module):
    """A norm between two convolutions, and an activation behind it.

    Args:
        norm: as `nn.BatchNorm2d` takes its arguments.
        given: calls it, or what it does.
        activation: of its result.
    """

    def __init__(
        self,
        given: Callable[[nn.BatchNorm2d, Tensor], Tensor] = lambda norm, x: norm(x),
        activation: Callable[[Tensor], Tensor] = F.relu_,
        norm: type[nn.BatchNorm2d] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.before, self.behind = (nn.Conv2d(16, 16, 1, bias=False) for _ in range(2))
        self.norm, self.given, self.activation = norm(16), given, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.activation(self.given(self.norm, self.before(x))))


def gradients_behind(
    make: Callable[[], Normed],
    directory: Path | None,
    *,
    change: Callable[[Normed, int], None],
    before_backward: Callable[[Normed], object] = id,
) -> list[Tensor]:
    """Of the last convolution's weight, in all steps."""
    model = make()
    handle = None
    if directory is not None:
        handle = offload_activations(model, directory, mode="ssd", min_bytes=4096)
    found = []
    for step in range(7):
        change(model, step)
        torch.manual_seed(step)
        loss = model(torch.randn(4, 16, 8, 8)).square().mean()
        before_backward(model)
        found += torch.autograd.grad(loss, [model.behind.weight])
    if handle is not None:
        handle.close()
    return found


def no_change(model: Normed, step: int) -> None:
    pass


@pytest.mark.parametrize("activation", ["elu_", "silu_"])
def test_what_is_written_over_before_the_next_save_is_not_computed_again(tmp_path, activation):
    """The first writes do not show in the bytes."""
    factors: list[float] = []

    def change(model: Normed, step: int) -> None:
        factors.append(1.0 if step < 4 else 2.0)

    def written(x: Tensor) -> Tensor:
        x = ACTIVATIONS[activation](x)
        with torch.no_grad():
            return x.mul_(factors[-1])

    def train(directory: Path | None) -> list[Tensor]:
        return gradients_behind(lambda: Normed(activation=written), directory, change=change)

    assert all(map(torch.equal, train(tmp_path), train(None)))


def test_a_node_that_was_freed_says_nothing_of_its_result(engine):
    """Nor of what it was given: torch shows nothing where there was something."""
    available = engine.hooks.recipes.available
    x, weight = leaf(), torch.ones(48)
    result, normed = (x * 2).relu_(), F.layer_norm(x, [48], weight)
    assert available.is_as_made(result, result.grad_fn)
    assert not lacks(normed.grad_fn, "weight") and lacks(normed.grad_fn, "bias")
    (result.sum() + normed.sum()).backward()
    assert not available.is_as_made(result, result.grad_fn)
    assert not lacks(normed.grad_fn, "weight") and lacks(normed.grad_fn, "bias")


def test_a_bias_that_a_norm_was_not_given_is_not_added(tmp_path):
    """A bias of zeros would not show in the bytes."""

    def without_bias(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, norm.weight, training=True)

    def change(model: Normed, step: int) -> None:
        if step == 4:
            model.norm.bias.data.fill_(1)

    def train(directory: Path | None) -> list[Tensor]:
        return gradients_behind(lambda: Normed(without_bias), directory, change=change)

    assert all(map(torch.equal, train(tmp_path), train(None)))


def test_a_module_of_others_is_not_asked_for_its_bias(tmp_path):
    class Shifted(nn.BatchNorm2d):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.shift = nn.Parameter(torch.zeros(size), requires_grad=False)
            self.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, self.weight, self.shift, training=True)

    def change(model: Normed, step: int) -> None:
        if step == 4:
            model.norm.shift.data.fill_(1)

    def train(directory: Path | None) -> list[Tensor]:
        return gradients_behind(lambda: Normed(norm=Shifted), directory, change=change)

    assert all(map(torch.equal, train(tmp_path), train(None)))


def test_statistics_that_run_on_before_backward_are_those_of_forward(tmp_path):
    """Autograd does not notice that they do."""

    def run_on(model: Normed) -> None:
        model.norm.train()(torch.randn(4, 16, 8, 8))
        model.norm.eval()

    def make() -> Normed:
        model = Normed()
        model.norm.eval()
        return model

    def train(directory: Path | None) -> list[Tensor]:
        return gradients_behind(make, directory, change=no_change, before_backward=run_on)

    assert all(map(torch.equal, train(tmp_path), train(None)))
