# SPDX-License-Identifier: Apache-2.0
"""Layers and MLPs that run again in backward, when their modules have changed since: same bits."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from megatron.offload import ChangedInPlaceError, offload_activations
from tests.support.same_training import digest, gradients_of

HIDDEN, TOKENS = 32, 16
STRENGTH: contextvars.ContextVar[float] = contextvars.ContextVar("strength", default=1.0)


class Block(torch.nn.Module):
    """A layer with dropout, a batch norm, attention, and switches such as those of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("shift", torch.zeros(HIDDEN))
        self.scale = 1.0
        self.active = ["one"]
        self.scales = {"one": 1.0, "other": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale * self.scales[self.active[0]] * STRENGTH.get()
        step = torch.ones(()) / 3  # of the default type
        made = self.project((x + self.shift + step.float() + torch.tanh(x)) * scale)
        made = self.norm(made.transpose(1, 2)).transpose(1, 2)
        heads = self.dropout(made).unflatten(-1, (4, -1)).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x + attended.transpose(1, 2).flatten(2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        for layer in self.layers:
            x = layer(x)
        return x


def evaluates(net: Any, x: torch.Tensor) -> torch.Tensor:
    loss = net.train()(x).square().mean()
    net.eval()
    return loss


def calls_with_others(net: Any, x: torch.Tensor) -> torch.Tensor:
    """As MAML and ensembles do; running statistics have a part in the result of `eval`."""
    tensors = {name: one * 1.25 for name, one in net.named_parameters()}
    tensors.update({name: one + 1 for name, one in net.named_buffers()})
    return torch.func.functional_call(net.eval(), tensors, (x,)).square().mean()


def freezes(net: Any, x: torch.Tensor) -> torch.Tensor:
    for one in net.parameters():
        one.requires_grad_()
    loss = net(x).square().mean()
    for one in net.layers[1].parameters():
        one.requires_grad_(False)
    return loss


def hooks(net: Any, x: torch.Tensor) -> torch.Tensor:
    """As libraries do that change what a module inside of a layer returns."""

    def doubles(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * 2

    handles = [layer.norm.register_forward_hook(doubles) for layer in net.layers]
    loss = net(x).square().mean()
    for handle in handles:
        handle.remove()
    return loss


def switches(net: Any, x: torch.Tensor) -> torch.Tensor:
    one = net(x).square().mean()
    for layer in net.layers:
        layer.scale, layer.active = 3.0, ["other"]
    other = net(x).square().mean()
    for layer in net.layers:
        layer.scale, layer.active, layer.scales["other"] = 1.0, ["one"], 0.25
    return one + other


def chooses_kernels(net: Any, x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return net(x).square().mean()


def sets_a_context_variable(net: Any, x: torch.Tensor) -> torch.Tensor:
    token = STRENGTH.set(2.0)
    loss = net(x).square().mean()
    STRENGTH.reset(token)
    return loss


def has_another_default_type(net: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.bfloat16)
    try:
        made: torch.Tensor = net(x)
    finally:
        torch.set_default_dtype(torch.float32)
    return made.square().mean()


class _Doubling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


def enters_a_mode(net: Any, x: torch.Tensor) -> torch.Tensor:
    with _Doubling():
        made: torch.Tensor = net(x)
    return made.square().mean()


def shifts(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Autograd saves no term of a sum, so a script may change it before backward."""
    losses = []
    for number in range(2):
        for layer in net.layers:
            layer.shift.fill_(number / 2)
        losses.append(net(x).square().mean())
    return torch.stack(losses).sum()


class Settings:
    """What a model hands to its layers as one object."""

    def __init__(self) -> None:
        self.strength, self.memory = 1.0, [torch.ones(HIDDEN)]


class Conditioned(Block):
    """Gets a condition from the model before each pass, as Flamingo's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.condition: torch.Tensor | None = None
        self.bank: list[torch.Tensor] = []
        self.settings = Settings()
        self.counted = torch.zeros(20_000)  # more than is copied without need
        self.normed = torch.nn.utils.spectral_norm(torch.nn.Linear(HIDDEN, HIDDEN))
        self.cached = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.counted.add_(x.mean())
        assert self.condition is not None
        x = (x + sum(self.bank)) * self.settings.strength + self.settings.memory[0]
        return super().forward(self.cached(self.normed(x + self.condition)) + self.counted[:HIDDEN])


class ConditionedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Conditioned() for _ in range(3))
        self.project = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        condition = self.project(x * factor).tanh()
        for layer in self.layers:
            layer.condition = condition
            layer.bank[:] = [x * factor, condition.detach().cos()]
            layer.settings.strength = factor
            layer.settings.memory[0] = layer.settings.memory[0] * factor
        x = super().forward(x)
        for layer in self.layers:
            layer.condition = None
            layer.bank.clear()
        return x


def sets_conditions(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Two passes before backward, each with what the model has put into its layers."""
    one, other = net(x, 0.5), net(x, 1.5)
    return (one * other).mean()


def caches_weights(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Backward comes after the context; the second call finds what the first has computed."""
    with torch.nn.utils.parametrize.cached():
        return net(net(x)).square().mean()


@pytest.mark.parametrize(
    "change",
    [
        evaluates,
        calls_with_others,
        freezes,
        hooks,
        switches,
        chooses_kernels,
        sets_a_context_variable,
        has_another_default_type,
        enters_a_mode,
        shifts,
        sets_conditions,
        caches_weights,
    ],
)
def test_a_layer_runs_again_as_it_ran(
    change: Callable[[Any, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    def run(settings: dict[str, Any] | None) -> list[Any]:
        torch.manual_seed(3)
        conditioned = change in (sets_conditions, caches_weights)
        net, found = (ConditionedNet() if conditioned else Net()), []
        with contextlib.ExitStack() as stack:
            if settings is not None:
                offload = stack.enter_context(offload_activations(net, tmp_path, **settings))
            for _ in range(2):
                loss = change(net, torch.randn(2, TOKENS, HIDDEN))
                loss.backward()  # type: ignore[no-untyped-call]
                found.append((digest(loss), gradients_of(net), _state(net)))
                net.zero_grad()
            if settings is not None:
                assert offload.statistics["recomputed_layers"] >= 2  # what wants no gradient is not
        return found

    assert run({"min_bytes": 1, "recompute_layers": "all"}) == run(None)


def _state(net: Any) -> list[Any]:
    """What others find afterwards: as without us."""
    flags = [(one.norm.training, len(one.norm._forward_hooks)) for one in net.layers]
    switched = [(one.scale, one.active[0], dict(one.scales)) for one in net.layers]
    wanted = [one.requires_grad for one in net.parameters()]
    return [flags, switched, wanted, [digest(one) for one in net.buffers()]]


class Meter:
    """Centers what it gets by a mean that each call moves."""

    def __init__(self) -> None:
        self.mean, self.counts = torch.zeros(HIDDEN), [0]

    def centered(self, x: torch.Tensor) -> torch.Tensor:
        self.counts[0] += 1
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        return x - self.mean / self.counts[0]


def _counted(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    counts.append(len(counts))
    return x / len(counts)


class Signature(tuple):
    """As e3nn's: it does not tell its length."""

    def __len__(self) -> int:
        raise NotImplementedError


class Borrowing(torch.nn.Module):
    """Calls what torch does not have among its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HIDDEN, HIDDEN)
        self.hidden = {"norms": [torch.nn.BatchNorm1d(HIDDEN)]}
        self.meters = (Meter(),)
        self.centered = Meter().centered
        self.counted = functools.partial(_counted, counts=[])
        self.signatures = [Signature((1, 2))]

    def forward(self, x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
        made = self.meters[0].centered(self.centered(self.counted(self.project(x))))
        made = self.hidden["norms"][0](made.transpose(1, 2))
        return x + norm(made).transpose(1, 2)


class Lender(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Borrowing() for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        for one in self.layers:
            one.model = [self]  # around the layer: it is not looked at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0].project(x)
        for layer in self.layers:
            x = layer(x, self.norm)
        return x


@pytest.mark.parametrize("twice", [False, True])
def test_what_a_layer_calls_and_does_not_have_is_as_it_was(twice: bool, tmp_path: Path) -> None:
    def run(recompute: str | None) -> list[Any]:
        torch.manual_seed(3)
        net, found = Lender(), []
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute) as offload:
            for _ in range(3):
                loss = net(torch.randn(2, TOKENS, HIDDEN)).square().mean()
                if twice:
                    loss = loss + net(torch.randn(2, TOKENS, HIDDEN)).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                found.append((digest(loss), gradients_of(net)))
                net.zero_grad()
            if recompute is not None:
                assert offload.statistics["recomputed_layers"] == (6 if twice else 3)
        for one in net.layers:
            meters = one.meters[0], one.centered.__self__
            found.append([(digest(meter.mean), meter.counts) for meter in meters])
            found.append([one.counted.keywords, digest(one.hidden["norms"][0].running_var)])
        return [*found, digest(net.norm.running_mean)]

    assert run("all") == run(None)


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU())
        self.inner = torch.jit.script(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def test_a_layer_with_torchscript_in_it_moves_instead_of_running_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(recompute: str | None) -> list[Any]:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), *(Scripted() for _ in range(3)))
        found = []
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute) as offload:
            for _ in range(3):
                loss = net(torch.randn(2, TOKENS, HIDDEN)).square().mean()
                loss.backward()
                found.append((digest(loss), gradients_of(net)))
                net.zero_grad()
            assert offload.statistics["recomputed_layers"] == 0
        return found

    assert run("all") == run(None)
    assert "a part of it is TorchScript" in caplog.text


def test_a_layer_runs_again_with_context_variables_of_its_own_thread(tmp_path: Path) -> None:
    """Backward of a device runs in a thread that has none of those that the script has set."""

    def run(around: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(3)
        net = Net()
        with around(net):
            loss = sets_a_context_variable(net, torch.randn(2, TOKENS, HIDDEN))
            backward = threading.Thread(target=loss.backward)
            STRENGTH.set(3.0)
            backward.start()
            backward.join()
            return [digest(loss), gradients_of(net)]

    def offloaded(net: Any) -> Any:
        return offload_activations(net, tmp_path, min_bytes=1, recompute_layers="all")

    found, expected = (
        contextvars.copy_context().run(run, around)
        for around in (offloaded, contextlib.nullcontext)
    )
    assert found == expected


def test_a_parameter_that_is_changed_in_place_before_a_layer_runs_again_is_refused(
    tmp_path: Path,
) -> None:
    """Autograd saves no bias: with biases alone that are trained it has the gradients of before."""
    net = Net()
    with offload_activations(net, tmp_path, min_bytes=1, recompute_layers="all"):
        loss = net(torch.randn(2, TOKENS, HIDDEN).requires_grad_()).square().mean()
        with torch.no_grad():
            net.layers[1].project.bias += 1  # type: ignore[operator, union-attr]
        buffers = list(net.buffers())
        with pytest.raises(ChangedInPlaceError, match=r"a parameter, bias, .* before the opt"):
            loss.backward()  # type: ignore[no-untyped-call]
        assert all(one is other for one, other in zip(net.buffers(), buffers, strict=True))


def test_a_large_buffer_that_is_changed_in_place_before_a_layer_runs_again_is_refused(
    tmp_path: Path,
) -> None:
    net = Net()
    for layer in net.layers:
        layer.shift = torch.zeros(40, TOKENS, HIDDEN)
    with offload_activations(net, tmp_path, min_bytes=1, recompute_layers="all"):
        loss = net(torch.randn(40, TOKENS, HIDDEN)).square().mean()
        net.layers[1].shift += 1  # type: ignore[operator]
        with pytest.raises(ChangedInPlaceError, match="a buffer, shift, of a layer"):
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_a_large_buffer_that_gets_the_same_values_again_is_as_it_was(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """As data parallelism gives it to all ranks, before the second of two forward passes."""

    def run(recomputed: str | None, *, moves_one: bool = False) -> list[Any]:
        torch.manual_seed(4)
        net = Net()
        for layer in net.layers:  # no whole words of eight bytes
            layer.mask = torch.nn.Buffer((torch.randn(1 << 17) > 0)[: (1 << 17) - 7].to(dtype))
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recomputed):
            loss = net(torch.randn(2, TOKENS, HIDDEN)).square().mean()
            for layer in net.layers:
                layer.mask.copy_(layer.mask.roll(1) if moves_one else layer.mask.clone())
            loss.backward()  # type: ignore[no-untyped-call]
        return [loss.item(), gradients_of(net)]

    assert run("all") == run(None)
    with pytest.raises(ChangedInPlaceError, match="a buffer, mask, of a layer"):
        run("all", moves_one=True)


def test_a_layer_is_not_recomputed_within_forward_mode(tmp_path: Path) -> None:
    """Its tangents are gone by backward."""

    def run(recomputed: str | None) -> list[Any]:
        torch.manual_seed(3)
        net = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))
        )
        with offload_activations(
            net, tmp_path, min_bytes=1, recompute_layers=recomputed
        ) as offload:
            x = torch.randn(4, 8).requires_grad_()
            with forward_ad.dual_level():
                made = net(forward_ad.make_dual(x, torch.ones_like(x)))
                value, tangent = forward_ad.unpack_dual(made)
            (value.square().mean() + tangent.square().mean()).backward()
            assert offload.statistics["recomputed_layers"] == 0
        return [digest(x.grad), gradients_of(net)]

    assert run("all") == run(None)


class Adding(Block):
    """Changes a tensor with a graph that it has as an attribute."""

    total: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.mean()
        return super().forward(x) + self.total


def add_up(net: Any, x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(()).requires_grad_() * 1
    for layer in net.layers:
        layer.total = total
    result: torch.Tensor = net(x).square().mean()
    return result


def test_an_attribute_with_a_graph_that_a_layer_changes_in_place_is_refused(tmp_path: Path) -> None:
    net = Net()
    net.layers = torch.nn.ModuleList(Adding() for _ in range(2))
    with (
        offload_activations(net, tmp_path, min_bytes=1, recompute_layers="all"),
        pytest.raises(ChangedInPlaceError, match="has changed its attribute total in place"),
    ):
        add_up(net, torch.randn(2, TOKENS, HIDDEN))


def test_an_attribute_that_is_changed_in_place_before_a_layer_runs_again_is_refused(
    tmp_path: Path,
) -> None:
    net = Net()
    net.layers = torch.nn.ModuleList(Conditioned() for _ in range(2))
    with offload_activations(net, tmp_path, min_bytes=1, recompute_layers="all"):
        x = torch.randn(2, TOKENS, HIDDEN)
        bank = [torch.ones(HIDDEN)]
        for layer in net.layers:
            layer.condition, layer.bank = x, bank  # type: ignore[assignment]
        loss = net(x).square().mean()
        bank[0].mul_(2)
        with pytest.raises(ChangedInPlaceError, match="such as bank"):
            loss.backward()  # type: ignore[no-untyped-call]


def test_auto_does_not_plan_a_layer_that_changes_an_attribute_with_a_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    net.layers = torch.nn.ModuleList(Adding() for _ in range(2))
    with offload_activations(
        net, tmp_path, mode="auto", memory_budget_bytes="1MiB", min_bytes=1
    ) as offload:
        for _ in range(6):
            add_up(net, torch.randn(2, TOKENS, HIDDEN)).backward()  # type: ignore[no-untyped-call]
        assert offload.statistics["recomputed_layers"] == 0
    assert "changes its attribute total in place, so it is not planned" in caplog.text


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class WithMlps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"mlp": Mlp()}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)  # type: ignore[index]
        return x


@contextlib.contextmanager
def _tiled(net: torch.nn.Module) -> Iterator[None]:
    with offload_activations(net, mode="keep", tiled_mlp=64):
        yield


def test_an_mlp_over_tiles_has_the_gradients_of_the_parameters_that_it_was_called_with() -> None:
    """Within rounding, as all gradients of tiles."""

    def run(around: Callable[[torch.nn.Module], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        net = WithMlps().double()
        x = torch.randn(1, 256, 8, dtype=torch.float64)
        with around(net):
            tensors = {name: one * 1.25 for name, one in net.named_parameters()}
            torch.func.functional_call(net, tensors, (x,)).square().sum().backward()
        return {name: one.grad for name, one in net.named_parameters() if one.grad is not None}

    found, expected = run(_tiled), run(contextlib.nullcontext)
    assert found.keys() == expected.keys() and len(found) == 8
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one)


class Counting(torch.nn.Module):
    """Hands on by attributes what the model takes away before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.count = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.append(self.count)
        self.penalty = self.project(x).square().mean()
        return x + torch.tanh(self.project(x))


def test_what_is_again_as_before_a_layer_ran_stays_so_when_it_runs_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*(Counting() for _ in range(3)))
    handle = offload_activations(layers, tmp_path, layers=["Counting"], recompute_layers="all")
    with handle:
        loss = layers(torch.randn(4, 8)).sum()
        loss = loss + sum(vars(one).pop("penalty") for one in layers)
        for one in layers:
            one.count = 0
            one.seen.clear()
        loss.backward()
        assert handle.statistics["recomputed_layers"] >= 2
    for one in layers:
        assert (one.count, one.seen, hasattr(one, "penalty")) == (0, [], False)
