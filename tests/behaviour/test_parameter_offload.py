# SPDX-License-Identifier: Apache-2.0
"""Parameters of layers that wait on a tier: the same bits, read twice a step, and never zeros."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    LayerMajor,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.device.open import open_device
from megatron.offload.errors import LostStateError
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.unit import ParameterUnit
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.transfer import Transfer
from tests.behaviour.test_layer_major_steps import (
    HIDDEN,
    LAYERS,
    MICRO_BATCHES,
    Language,
    Outcome,
    micro_batches,
    usual,
)
from tests.support.beneath import beneath
from tests.support.layer_major import one_by_one
from tests.support.mounts import flip_a_bit
from tests.support.training import moving


class Trained:
    """A model after some steps, and what was read of its parameters in the last one.

    Args:
        directory: for whatever moves.
        offloaded: parameters, states or activations, or several of them.
        in_units: of a layer-major step; None: one micro-batch after the other.
        settings: of the parameters.
    """

    def __init__(
        self,
        directory: Path | None,
        *offloaded: str,
        in_units: int | None = None,
        steps: int = 3,
        **settings: Any,
    ) -> None:
        model = self.model = Language()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.passes_read_bytes = 0
        with moving(offloaded, model, optimizer, directory, parameters=settings) as moved:
            self.parameters = moved.parameters
            step = moved.steps(model, in_units)
            for number in range(steps):
                optimizer.zero_grad()
                before = self._read_bytes
                self.losses += [float(loss) for loss in step(micro_batches(number))]
                self.passes_read_bytes = self._read_bytes - before
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                self.norms.append(float(norm))
                optimizer.step()
            self.counted = self.parameters.statistics if self.parameters is not None else {}
            self.shown = {k: v.clone() for k, v in model.state_dict().items()}
        self.weights = {k: v.clone() for k, v in model.state_dict().items()}

    @property
    def _read_bytes(self) -> int:
        return int(self.parameters.statistics["read_bytes"]) if self.parameters is not None else 0

    def assert_is(self, other: Trained) -> None:
        assert (self.losses, self.norms) == (other.losses, other.norms)
        for name, weight in other.weights.items():
            assert torch.equal(self.weights[name], weight), name
            assert torch.equal(self.shown[name], weight), name


@pytest.fixture(scope="module")
def in_memory() -> Trained:
    return Trained(None)


@pytest.mark.parametrize("units", [None, 3], ids=["one by one", "layer-major"])
@pytest.mark.parametrize(
    ("offloaded", "settings"),
    [
        ("parameters", {"units": 3}),
        ("parameters", {"mode": "host"}),
        ("parameters", {"live_units": 4, "io": "buffered"}),
        ("parameters states activations", {}),
    ],
)
def test_all_bits_are_the_same(
    offloaded: str, settings: dict[str, Any], units: int | None, in_memory: Trained, tmp_path: Path
) -> None:
    trained = Trained(tmp_path, *offloaded.split(), in_units=units, **settings)
    trained.assert_is(in_memory)
    assert trained.counted["read_bytes"] > 0


def test_parameters_come_in_twice_a_step_or_twice_a_micro_batch(tmp_path: Path) -> None:
    """But for the units with which a direction ends: they are there when the next one begins."""
    together = Trained(tmp_path, "parameters", in_units=LAYERS)
    alone = Trained(tmp_path, "parameters")
    each = together.counted["parameter_bytes"] / LAYERS
    once = 2 * (LAYERS - 2) * each  # with two of them in memory where a direction ends
    # Some of those that forward needs may still be there from the optimizer's step.
    assert once / 2 <= together.passes_read_bytes <= once
    assert MICRO_BATCHES * once - once / 2 <= alone.passes_read_bytes <= MICRO_BATCHES * once


def test_no_more_units_are_in_memory_than_may_live(tmp_path: Path) -> None:
    """With states that move too, the optimizer's step needs no more; one may still be written."""
    trained = Trained(tmp_path, "parameters", "states", in_units=LAYERS)
    each = trained.counted["parameter_bytes"] / LAYERS
    assert 2 * each <= trained.counted["peak_bytes"] <= 3 * each


def test_a_bucket_of_all_layers_brings_one_unit_at_a_time(tmp_path: Path) -> None:
    """Of biases and norms, as a rule: they have a group of their own, without weight decay."""
    model, expected = Language(), Language()
    handle = offload_parameters(model, tmp_path)
    for one in (model, expected):
        groups = [
            {"params": [p for p in one.parameters() if (p.dim() > 1) is is_weight]}
            for is_weight in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if one is model:
            offload_optimizer(optimizer, tmp_path, bucket_bytes=1 << 30)
        torch.manual_seed(5)
        one(micro_batches(0)[0]).backward()
        optimizer.step()
    each = handle.statistics["parameter_bytes"] / LAYERS
    assert 2 * each <= handle.statistics["peak_bytes"] <= 3 * each
    handle.close()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, other)


def test_a_step_of_two_groups_reads_each_unit_once(tmp_path: Path) -> None:
    """Though what has no weight decay of all layers would fit into one bucket."""
    model = Language()
    with offload_parameters(model, tmp_path) as handle:
        params = list(model.parameters())
        groups = [[p for p in params if (p.dim() > 1) == is_large] for is_large in (True, False)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
        bucket_bytes = 2 * sum(p.nbytes for p in groups[1])
        with offload_optimizer(optimizer, tmp_path, bucket_bytes=bucket_bytes):
            model(micro_batches(0)[0]).backward()
            before_bytes = handle.statistics["read_bytes"]
            optimizer.step()
            read_bytes = handle.statistics["read_bytes"] - before_bytes
        each = handle.statistics["parameter_bytes"] / LAYERS
        assert (LAYERS - 2) * each <= read_bytes <= LAYERS * each  # two were there


@pytest.fixture
def offloaded(tmp_path: Path) -> tuple[Language, ParameterOffload]:
    model = Language().eval()
    return model, offload_parameters(model, tmp_path)


def units_of(handle: ParameterOffload) -> list[ParameterUnit]:
    assert handle.window is not None
    return handle.window.units


def away(handle: ParameterOffload) -> ParameterUnit:
    for unit in units_of(handle):
        unit.wait_for_write()
    return next(one for one in reversed(units_of(handle)) if one.where is Where.ON_TIER)


def test_what_is_away_is_nan_beneath_and_shown_when_it_is_touched(
    offloaded: tuple[Language, ParameterOffload],
) -> None:
    _, handle = offloaded
    unit = away(handle)
    assert all(beneath(param).isnan().all() for param in unit.params)
    assert not unit.params[-1].isnan().any() and unit.where is Where.ON_TIER
    assert not any(beneath(param).isnan().any() for param in unit.params)
    handle.close()


@pytest.mark.parametrize("direction", [1, -1])
def test_the_next_unit_is_read_ahead(
    direction: int, offloaded: tuple[Language, ParameterOffload]
) -> None:
    _, handle = offloaded
    away(handle)
    assert handle.window is not None
    handle.window.use(3, direction)
    there = [n for n, unit in enumerate(units_of(handle)) if unit.where is not Where.ON_TIER]
    assert there == sorted([3, 3 + direction])
    handle.close()


def test_memory_is_let_go(tmp_path: Path) -> None:
    """What is away takes none: not before it was read once, either."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1 << 10, 1 << 10) for _ in range(6)))
    device = open_device(torch.device("cpu"))
    with offload_parameters(model, tmp_path, layers=[torch.nn.Linear]) as handle:
        for unit in units_of(handle):
            unit.wait_for_write()
        away_bytes = device.allocated_bytes()
        for unit in units_of(handle):
            unit.bring()
        size = sum(unit.num_bytes for unit in units_of(handle))
        assert device.allocated_bytes() - away_bytes > 0.9 * size


def test_a_state_dict_has_them_and_takes_them(tmp_path: Path) -> None:
    expected, model = Language(), Language()
    with torch.no_grad():
        for param in expected.parameters():
            param.add_(1)
    with offload_parameters(model, tmp_path):
        model.load_state_dict(expected.state_dict())
        with torch.no_grad():
            loss = model.eval()(micro_batches(0)[0])
            assert torch.equal(loss, expected.eval()(micro_batches(0)[0]))
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, expected.state_dict()[name])
        layer = model.layers[2].state_dict()
        assert torch.equal(layer["up.weight"], expected.layers[2].up.weight)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name])


def test_after_closing_the_model_is_as_it_was(tmp_path: Path) -> None:
    model, expected = Language(), Language()
    handle = offload_parameters(model, tmp_path)
    handle.close()
    handle.close()
    for layer in model.layers:
        assert not layer._forward_pre_hooks and not layer._forward_hooks
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other) and one.is_contiguous()


def test_a_deep_copy_of_a_model_is_whole_and_another_model(
    offloaded: tuple[Language, ParameterOffload],
) -> None:
    """For moving averages, say. Also of weights that are copied before anybody hears of it."""
    model, handle = offloaded
    expected, batch = Language().eval(), micro_batches(0)[0]
    assert beneath(away(handle).params[0]).isnan().all()
    params, twin = copy.deepcopy((list(model.parameters()), model))
    for one, copied, other in zip(twin.parameters(), params, expected.parameters(), strict=True):
        assert torch.equal(one, other) and copied is one and one.requires_grad
    with torch.no_grad():
        model(batch)  # nobody looks any more
    was, before = away(handle), handle.statistics
    loss = twin(batch)
    loss.backward()
    assert torch.equal(loss, expected(batch))
    copy.deepcopy(twin).double()(batch)
    twin.load_state_dict({name: 2 * value for name, value in twin.state_dict().items()})
    assert handle.statistics == before and beneath(was.params[0]).isnan().all()
    handle.close()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other) and one.grad is None


def test_a_model_that_is_converted_meanwhile_is_an_error_and_nothing_is_lost(
    offloaded: tuple[Language, ParameterOffload],
) -> None:
    model, handle = offloaded
    model.to(torch.float64)
    sentence = "parameters: .* had type torch.float32 when it was offloaded and has torch.float64"
    with pytest.raises(ConfigurationError, match=sentence):
        model(micro_batches(0)[0])
    with pytest.raises(ConfigurationError, match=sentence):
        model.state_dict()
    handle.close()
    for one, other in zip(model.parameters(), Language().parameters(), strict=True):
        assert torch.equal(one.float(), other)


class Shared(Language):
    """Uses a weight, and a part of a layer, outside of the layers too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(4 * HIDDEN, HIDDEN)
        self.last.weight = self.layers[1].down.weight
        self.norm = self.layers[4].norm

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(self.norm(x) + self.last(x.repeat(1, 1, 4)), tokens)


@pytest.mark.parametrize("gradients", ["off", "on"])
def test_what_is_used_outside_of_layers_too_stays(gradients: str, tmp_path: Path) -> None:
    found, expected = Shared(), Shared()
    with offload_parameters(found, tmp_path, gradients=gradients) as handle:
        away(handle)
        staying = {found.last.weight, *found.norm.parameters()}
        assert not any(beneath(param).isnan().any() for param in staying)
        for model in (found, expected):
            torch.manual_seed(5)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            layer_major = LayerMajor(model)
            for number in range(2):
                optimizer.zero_grad()
                layer_major.step(micro_batches(number), model)
                optimizer.step()
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_flipped_bit_ends_the_training(
    offloaded: tuple[Language, ParameterOffload], caplog: pytest.LogCaptureFixture
) -> None:
    model, handle = offloaded
    unit = away(handle)
    (extent,) = unit.block.extents
    flip_a_bit(extent, 5)
    sentence = r"^parameters: those of unit \d of 6 .* checksum mismatch.* no other copy"
    with caplog.at_level(logging.WARNING), pytest.raises(LostStateError, match=sentence):
        model(micro_batches(0)[0])
    assert "trying once more" in caplog.text
    with pytest.raises(LostStateError):
        handle.close()


def test_what_no_tier_takes_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Language()
    handle = offload_parameters(model, tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = copy.deepcopy(Language())
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert handle.window is not None
    monkeypatch.setattr(handle.window.tiers[0], "begin_write", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            for one, steps in ((model, optimizer), (expected, reference)):
                torch.manual_seed(step)
                one(micro_batches(step)[0]).backward()
                steps.step()
                steps.zero_grad()
    assert caplog.text.count("parameters: no tier takes ") == 1
    handle.close()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_a_drive_failed_to_take_at_first_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, num_taken = SsdTier.begin_write, 0

    def begin_write(self: SsdTier, storage: Any, after: Any) -> Any:
        nonlocal num_taken
        num_taken += 1
        started = take(self, storage, after)
        if num_taken > 1 or started is None:
            return started
        block, written = started
        written.wait()
        failed = Transfer()
        failed.fail("the first write")
        return block, failed

    monkeypatch.setattr(SsdTier, "begin_write", begin_write)
    model, expected = Language().eval(), Language().eval()
    with offload_parameters(model, tmp_path) as handle, torch.no_grad():
        assert handle.window is not None and handle.window.units[0].where is Where.IN_MEMORY
        for number in range(2):
            (batch,) = micro_batches(number)[:1]
            assert torch.equal(model(batch), expected(batch))


@pytest.mark.parametrize("mode", ["ssd", "host"])
@pytest.mark.parametrize("num_run", [0, 1], ids=["all away", "some in memory"])
def test_what_is_changed_through_data_while_it_is_exposed_stays_so(
    mode: str, num_run: int, tmp_path: Path
) -> None:
    model, expected = Language().eval(), Language().eval()
    directory = tmp_path if mode == "ssd" else None
    with offload_parameters(model, directory, mode=mode) as handle, torch.no_grad():
        for batch in micro_batches(0)[:num_run]:
            model(batch)
        handle.expose()
        for param in (*model.parameters(), *expected.parameters()):
            param.data.mul_(1.5)
        for batch in micro_batches(1)[:2]:
            assert torch.equal(model(batch), expected(batch))
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


class Failing(torch.optim.SGD):
    """Ends with an error when all parameters are updated: in place, or through their data."""

    def __init__(self, params: Any, *, through_data: bool) -> None:
        super().__init__(params, lr=0.1)
        self.through_data = through_data

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            (param.data if self.through_data else param).sub_(param.grad, alpha=0.1)
        raise KeyboardInterrupt


@pytest.mark.parametrize("through_data", [False, True])
def test_what_an_optimizer_has_updated_before_an_error_is_not_lost(
    through_data: bool, tmp_path: Path
) -> None:
    trained, expected = Language().eval(), Language().eval()
    handle = offload_parameters(trained, tmp_path)
    for model in (trained, expected):
        optimizer = Failing(model.parameters(), through_data=through_data)
        model(micro_batches(0)[0]).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with torch.no_grad():
            model(micro_batches(1)[0])  # units leave
    handle.close()
    for one, other in zip(trained.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (
            Language,
            {"mode": "ssd"},
            "parameters: mode ssd needs a place on an SSD; give directory=...",
        ),
        (Language, {"mode": "host", "live_units": 1}, "live_units 1 leaves no room to read ahead"),
        (Language, {"mode": "host", "units": 9}, "the model has 6 layers"),
        (Language, {"mode": "tape"}, "mode: 'tape' is none of its values"),
    ],
)
def test_what_cannot_work_is_refused(
    make: Callable[[], torch.nn.Module], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        offload_parameters(make(), **settings)


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda one: torch.jit.trace(one, torch.ones(8))]
)
def test_parts_that_are_torchscript_are_refused(make: Any, tmp_path: Path) -> None:
    layers = torch.nn.Sequential(
        *[torch.nn.Sequential(make(torch.nn.Linear(8, 8)), torch.nn.ReLU()) for _ in range(2)]
    )
    with pytest.raises(ConfigurationError, match="Linear is TorchScript, which takes no hooks"):
        offload_parameters(layers, tmp_path)
    layers(torch.ones(2, 8)).sum().backward()  # nothing is left behind


def test_shared_parameters_are_refused(tmp_path: Path) -> None:
    model = Language()
    model.layers[4].up.weight = model.layers[1].up.weight
    with pytest.raises(ConfigurationError, match="belongs to layers of two units"):
        offload_parameters(model, tmp_path)


def test_outcomes_of_the_other_file_agree(tmp_path: Path) -> None:
    """The same training as there: what differs is where parameters are."""
    model = Language()
    with offload_parameters(model, tmp_path) as handle:
        found = Outcome(model, functools.partial(one_by_one, model))
        handle.expose()
        found.assert_is(usual(Language))


class _HandsOn(torch.nn.Module):
    """A layer of which the first makes what the others take, and hand on: T5's position bias."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(HIDDEN))
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.bias = torch.nn.Parameter(torch.randn(HIDDEN)) if is_first else None

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(self.scale * x)
        if self.bias is not None:
            bias = self.bias * 2
        assert bias is not None
        return x + y * bias, bias


class _HandedOn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(_HandsOn(is_first=n == 0) for n in range(4))

    def forward(self, x: torch.Tensor, *, by_name: bool) -> torch.Tensor:
        x, bias = self.first(x), None
        for layer in self.layers:
            x, bias = layer(x, bias=bias) if by_name else layer(x, bias)
        return x.square().mean()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_that_hands_on_what_an_earlier_one_has_made(by_name: bool, tmp_path: Path) -> None:
    def run(mode: str) -> list[torch.Tensor | None]:
        model = _HandedOn()
        with offload_parameters(model, tmp_path, mode=mode):
            model(torch.ones(4, HIDDEN), by_name=by_name).backward()
            return [one.grad for one in model.parameters()]

    for found, expected in zip(run("ssd"), run("off"), strict=True):
        assert found is not None and expected is not None
        assert torch.equal(found, expected)
