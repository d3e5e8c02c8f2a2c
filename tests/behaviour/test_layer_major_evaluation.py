# SPDX-License-Identifier: Apache-2.0
"""`LayerMajor.evaluate` gives what a loop over the batches gives, and reads each unit once."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    LayerMajor,
    offload_activations,
    offload_parameters,
)
from megatron.offload.activations.capture.tensor_swapper import TensorSwapper
from megatron.offload.integration.torch.sharded_units import ShardedUnits
from megatron.offload.layer_major.boundary import AHEAD
from tests.behaviour.test_layer_major_steps import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Backwards,
    Crossed,
    Language,
    Short,
    Summed,
)
from tests.support.layer_major import failing_at, one_by_one, waiting_threads
from tests.support.models import Block, settle
from tests.support.waiting import wait_until_empty

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")

BATCHES = 5
Fn = Callable[[torch.nn.Module, torch.Tensor], Any]


def batches(number: int = BATCHES, *, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (2, 16), generator=draw) for _ in range(number)]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> Any:
    return model(batch)


def twice(model: torch.nn.Module, batch: torch.Tensor) -> Any:
    """As a pair of answers is scored."""
    return {"chosen": model(batch), "rejected": [model(batch.flip(-1))]}


def sampled(model: torch.nn.Module, batch: torch.Tensor) -> Any:
    return model(batch) + torch.rand(3)


def doubtful(model: torch.nn.Module, batch: torch.Tensor) -> Any:
    return model(batch) + random.random()


def in_a_loop(model: torch.nn.Module, fn: Fn, given: list[torch.Tensor]) -> tuple[Any, ...]:
    torch.manual_seed(7)
    random.seed(7)
    with torch.no_grad():
        results = [fn(model, one) for one in given]
    return results, torch.get_rng_state(), random.getstate()


def in_units(step: LayerMajor, fn: Fn, given: list[torch.Tensor]) -> tuple[Any, ...]:
    torch.manual_seed(7)
    random.seed(7)
    return step.evaluate(given, fn), torch.get_rng_state(), random.getstate()


def assert_same(mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0)
    assert torch.equal(mine[1], theirs[1]) and mine[2] == theirs[2]


def ran_by(model: torch.nn.Module, run: Callable[[], Any]) -> list[int]:
    """The numbers of the layers in the order in which they have run."""
    ran: list[int] = []
    layers: Any = model.layers
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=index: ran.append(i))
        for index, layer in enumerate(layers)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return ran


@pytest.mark.parametrize("units", [3, None])
@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("fn", [loss_of, twice, sampled, doubtful])
@pytest.mark.parametrize("kind", [Language, Crossed, Summed, Short, Backwards])
def test_all_bits_are_the_same(kind: Any, fn: Fn, trains: bool, units: int | None) -> None:
    """Also of models whose steps are refused: nothing has to be cut."""
    model = kind().train(trains)
    mine = in_units(LayerMajor(model, units), fn, batches())
    assert_same(mine, in_a_loop(model, fn, batches()))
    assert all(module.training is trains for module in model.modules())


@pytest.mark.parametrize("fn", [loss_of, sampled])
def test_a_unit_runs_all_batches_before_the_next(fn: Fn) -> None:
    """Numbers that are drawn behind the last layers change nothing."""
    model = Language().eval()
    step = LayerMajor(model, 3)
    ran = ran_by(model, lambda: step.evaluate(batches(), fn))
    assert ran == [*[0, 1] * BATCHES, *[2, 3] * BATCHES, *[4, 5] * BATCHES]


def test_a_second_pass_of_all_batches_follows_the_first() -> None:
    model = Language().eval()
    step = LayerMajor(model, 2)
    ran = ran_by(model, lambda: step.evaluate(batches(), twice))
    assert ran == [*[0, 1, 2] * BATCHES, *[3, 4, 5] * BATCHES] * 2


def test_where_layers_draw_numbers_each_batch_goes_on_alone() -> None:
    model = Language().eval()
    model.layers[3].train()
    step = LayerMajor(model, None)
    ran = ran_by(model, lambda: step.evaluate(batches(), loss_of))
    together = [*[0] * BATCHES, *[1] * BATCHES, *[2] * BATCHES]
    assert ran == [*together, *[3, 4, 5] * BATCHES]


def test_other_numbers_that_layers_draw_are_the_same() -> None:
    """Of Python's `random`, which no generator of torch shows."""
    model = Language().eval()
    model.layers[1].register_forward_hook(lambda _, args, result: result * random.random())
    mine = in_units(LayerMajor(model, None), doubtful, batches())
    assert_same(mine, in_a_loop(model, doubtful, batches()))


class Drawing(Language):
    """Draws a number behind its second layer for some batches."""

    drawn_for: list[torch.Tensor]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
            if layer is self.layers[1] and any(torch.equal(tokens, one) for one in self.drawn_for):
                torch.rand(1)
        return self.loss(x, tokens)


def test_a_later_batch_that_draws_before_an_earlier_one_is_refused() -> None:
    """The second draws among its layers, the first behind them: they would exchange numbers."""
    model, given = Drawing().eval(), batches(3)
    model.drawn_for = [given[1]]
    step = LayerMajor(model, None)
    assert_same(in_units(step, loss_of, given), in_a_loop(model, loss_of, given))
    with pytest.raises(ConfigurationError, match="batch 1 has drawn random numbers in an earlier"):
        step.evaluate(given, sampled)
    assert not waiting_threads()


def test_what_layers_keep_meets_the_batches_in_order() -> None:
    """Running means of BatchNorm, in training mode."""

    class Normed(Block):
        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.running = torch.nn.BatchNorm1d(hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return self.running(x.flatten(0, -2)).view_as(x)

    model = Language()
    model.layers = torch.nn.ModuleList(Normed(HIDDEN) for _ in range(LAYERS))
    model.eval()
    for module in model.modules():
        module.training = isinstance(module, torch.nn.BatchNorm1d)
    other = copy.deepcopy(model)
    mine = in_units(LayerMajor(model, None, alternates=True), loss_of, batches())
    assert_same(mine, in_a_loop(other, loss_of, batches()))
    for buffer, expected in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, expected)


def test_results_have_no_graph() -> None:
    """Neither what is computed with gradients within, nor a parameter itself."""
    model = Language().eval()

    def fn(model: Any, batch: torch.Tensor) -> Any:
        with torch.enable_grad():
            return model(batch), [model.embedding.weight]

    for loss, (weight,) in LayerMajor(model, 3).evaluate(batches(2), fn):
        assert loss.grad_fn is None and not weight.requires_grad
        assert weight.data_ptr() == model.embedding.weight.data_ptr()


def test_a_pass_with_gradients_within_has_all_of_them() -> None:
    """A function may take gradients of its own; nothing is cut."""
    model = Language().eval()

    def fn(model: Any, batch: torch.Tensor) -> Any:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(model(batch), [model.embedding.weight])
        return gradient

    mine = in_units(LayerMajor(model, 3), fn, batches())
    assert_same(mine, in_a_loop(model, fn, batches()))


def test_autocast_around_it_holds() -> None:
    model = Language().eval()
    step = LayerMajor(model, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(in_units(step, loss_of, batches()), in_a_loop(model, loss_of, batches()))


def test_what_fsdp_has_sharded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedUnits, "device", torch.device("cpu"))  # where it would gather
    with pytest.raises(ConfigurationError, match="evaluation: FSDP2 frees what it has gathered"):
        LayerMajor(Language()).evaluate(batches(), loss_of)


def test_no_batches_give_no_results() -> None:
    assert LayerMajor(Language()).evaluate([], loss_of) == []


def test_steps_before_and_after_it_have_their_bits() -> None:
    model, bare = Language(), Language()
    step = LayerMajor(model, 3)
    for number in range(3):
        given = batches(seed=number)
        torch.manual_seed(number)
        theirs = one_by_one(bare, given)
        torch.manual_seed(number)
        assert step.step(given, model) == theirs
        step.evaluate(given, loss_of)
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("where", [0, 3, 5])
def test_an_error_ends_it(where: int) -> None:
    model = Language().eval()
    step = LayerMajor(model, 3)
    hook = model.layers[where].register_forward_hook(failing_at(3, ZeroDivisionError("in a layer")))
    with pytest.raises(ZeroDivisionError, match="in a layer"):
        step.evaluate(batches(), loss_of)
    assert not waiting_threads()
    hook.remove()
    assert_same(in_units(step, loss_of, batches()), in_a_loop(model, loss_of, batches()))


# -- Parameters on a tier -------------------------------------------------------------------------


def read_bytes(step: LayerMajor, parameters: Any, number: int) -> int:
    before = parameters.statistics["read_bytes"]
    step.evaluate(batches(number), loss_of)
    return int(parameters.statistics["read_bytes"] - before)


@pytest.mark.parametrize("frozen", [True, False])
def test_each_unit_is_read_once_for_all_batches(frozen: bool, tmp_path: Path) -> None:
    model = Language().eval().requires_grad_(not frozen)
    expected = in_a_loop(model, loss_of, batches(8))
    with offload_parameters(model, tmp_path) as parameters:
        parameters.window.copies.wait_for_writes()  # what is still being written is in memory too
        step = LayerMajor(model)
        read_bytes(step, parameters, 1)
        one, eight = (read_bytes(step, parameters, number) for number in (1, 8))
        assert 0 < eight <= 1.05 * one <= 1.05 * parameters.statistics["parameter_bytes"]
        unit_bytes = parameters.statistics["parameter_bytes"] / LAYERS
        assert parameters.statistics["peak_bytes"] <= 2.01 * unit_bytes
        assert_same(in_units(step, loss_of, batches(8)), expected)


# -- What waits between units ---------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ssd", "host", "tiered"])
@pytest.mark.parametrize("kind", [Language, Crossed, Summed])
def test_all_bits_are_the_same_where_hidden_states_move(
    kind: Any, where: str, tmp_path: Path
) -> None:
    model = kind().eval()
    settings: dict[str, Any] = {"mode": where, "boundary": where, "min_bytes": 1}
    with offload_activations(model, tmp_path, **settings) as offload:
        step = LayerMajor(model, offload=offload)
        for fn in (loss_of, twice):
            assert_same(in_units(step, fn, batches()), in_a_loop(model, fn, batches()))
        engine = offload.engine
        assert engine is not None
        assert sum(tier.statistics.writes.total_bytes for tier in engine.tiers.values()) > 0
        assert offload.statistics == {}  # it is no step
        gc.collect()
        settle(engine)
        wait_until_empty(engine.tiers.values())


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that have left, one for each time."""
    found: list[torch.Tensor] = []
    empty = TensorSwapper.empty

    def noted(self: TensorSwapper, tensor: torch.Tensor, scope: Any) -> Any:
        swapped = empty(self, tensor, scope)
        if swapped is not None:
            found.append(tensor)
        return swapped

    monkeypatch.setattr(TensorSwapper, "empty", noted)
    return found


def test_hidden_states_leave_and_masks_stay(tmp_path: Path, left: list[torch.Tensor]) -> None:
    """One of each pass at each pause, but for those whose turns come next."""
    model = Masked().eval()
    with offload_activations(model, tmp_path, boundary="ssd", min_bytes=1) as offload:
        LayerMajor(model, None, offload=offload).evaluate(batches(), loss_of)
    assert {tuple(one.shape) for one in left} == {(2, 16, HIDDEN)}
    assert len(left) >= (LAYERS - 1) * (BATCHES - AHEAD)


class Masked(Language):
    """Gives all layers a tensor that it makes for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Adding(HIDDEN) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = tokens[..., None] * 0.01  # no view: it could leave
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.loss(x, tokens)


class Adding(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is not None
        return super().forward(x + mask)


def test_between_forward_and_backward_of_a_step_hidden_states_stay(
    tmp_path: Path, left: list[torch.Tensor]
) -> None:
    model, bare = Language().eval(), Language().eval()
    with offload_activations(model, tmp_path, boundary="ssd", min_bytes=1) as offload:
        step = LayerMajor(model, offload=offload)
        loss = model(batches()[0])
        mine = in_units(step, loss_of, batches())
        assert not left
        loss.backward()
        assert_same(mine, in_a_loop(model, loss_of, batches()))
        assert offload.statistics["offloaded_bytes"] > 0
    bare(batches()[0]).backward()
    for one, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Positioned(Masked):
    """Gives each layer a frozen table of its own, which waits for no turn."""

    def __init__(self) -> None:
        super().__init__()
        tables = [torch.full((2, 16, HIDDEN), 0.1 * i) for i in range(LAYERS)]
        for number, one in enumerate(tables):
            self.register_buffer(f"table{number}", one)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, mask=getattr(self, f"table{number}"))
        return self.loss(x, tokens)


def test_buffers_that_layers_take_stay(tmp_path: Path, left: list[torch.Tensor]) -> None:
    model = Positioned().eval()
    with offload_activations(model, tmp_path, boundary="ssd", min_bytes=1) as offload:
        step = LayerMajor(model, None, offload=offload)
        assert_same(in_units(step, loss_of, batches()), in_a_loop(model, loss_of, batches()))
    assert left and not {id(one) for one in left} & {id(one) for one in model.buffers()}


def test_a_tensor_that_batches_share_is_refused_while_it_is_away(tmp_path: Path) -> None:
    """The first batch makes it behind its first layer; the second takes it before that goes on."""

    class Sharing(Masked):
        shared: torch.Tensor | None = None

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for number, layer in enumerate(self.layers):
                is_first = self.shared is None
                if number and is_first:
                    self.shared = torch.ones(2, 16, HIDDEN) * 0.1
                x = layer(x, mask=torch.zeros(1) if self.shared is None else self.shared)
            return self.loss(x, tokens)

    model = Sharing().eval()
    with offload_activations(model, tmp_path, boundary="ssd", min_bytes=1) as offload:
        step = LayerMajor(model, None, offload=offload)
        with pytest.raises(ConfigurationError, match="a tensor that another micro-batch has as"):
            step.evaluate(batches(), loss_of)
    assert not waiting_threads()


def test_a_function_that_switches_modules_is_refused() -> None:
    """The others' layers would run in the mode of the last one that has switched it."""
    model = Language().train()
    step = LayerMajor(model)

    def as_in_evaluation(model: torch.nn.Module, batch: torch.Tensor) -> Any:
        model.eval()
        result = model(batch)
        model.train()
        return result

    with pytest.raises(ConfigurationError, match="has changed the mode of modules"):
        step.evaluate(batches(), as_in_evaluation)
    model.eval()
    assert_same(in_units(step, loss_of, batches()), in_a_loop(model, loss_of, batches()))


def test_adapters_that_a_function_switches_are_refused() -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(adapters, Language().eval())
    layers = [one for one in model.modules() if hasattr(one, "enable_adapters")]
    step = LayerMajor(model)

    def without(model: torch.nn.Module, batch: torch.Tensor) -> Any:
        for one in layers:
            one.enable_adapters(False)
        return model(batch)

    assert layers
    with pytest.raises(ConfigurationError, match="has changed the mode of modules"):
        step.evaluate(batches(), without)
