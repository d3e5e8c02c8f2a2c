# SPDX-License-Identifier: Apache-2.0
"""Connecting the engine: refusals before anything is touched, and everything restored after."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.offload import ConfigurationError, OffloadConfig
from megatron.offload.integration.megatron import decorators, install, layer_hooks
from megatron.offload.integration.megatron.estimate import (
    MARGIN,
    activation_bytes,
    layer_bytes,
    stage_of,
)
from megatron.offload.integration.megatron.layer_major import LayerMajorHooks
from megatron.offload.integration.megatron.layer_split import LayerDivision
from megatron.offload.integration.megatron.versions import SUPPORTED_VERSIONS, check_version
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_set import LayerSet
from megatron.offload.planner.projection.layer import layer_work
from megatron.offload.planner.projection.model import Parallelism, Transformer


def hooked() -> tuple[Any, ...]:
    """Megatron's functions that offload replaces."""
    return (
        TransformerLayer.forward,
        schedules.forward_step,
        schedules.backward_step,
        schedules.check_first_val_step,
    )


def model(**settings: Any) -> list[torch.nn.Module]:
    module = torch.nn.Linear(2, 2)
    module.config = SimpleNamespace(**settings)  # type: ignore[assignment]
    return [module]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Whatever a test does, Megatron is as it was."""
    before = hooked()
    yield
    assert hooked() == before


def test_install_replaces_and_close_restores(tmp_path: Path) -> None:
    before = hooked()
    offload = install(OffloadConfig(mode="ssd", directories=(tmp_path,)), model())
    assert not any(new is old for new, old in zip(hooked(), before, strict=True))
    offload.close()
    assert hooked() == before


def test_off_touches_nothing() -> None:
    before = hooked()
    offload = install(OffloadConfig(), model(recompute_granularity="full"))
    assert hooked() == before
    with offload.step():
        pass
    assert offload.statistics == {} and offload.summary() == ""
    offload.close()


def test_our_decorator_is_found_beneath_others_and_nowhere_else() -> None:
    def of_a_trainer(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    for function in (*hooked(), of_a_trainer(schedules.forward_step), functools.partial(model)):
        assert not decorators.is_decorated(function)
    for decorate in (
        decorators.around_layer,
        decorators.around_forward_step,
        decorators.around_backward_step,
        decorators.around_first_val_step,
    ):
        ours = decorate(of_a_trainer(model))
        assert decorators.is_decorated(ours) and decorators.is_decorated(of_a_trainer(ours))
        assert list(vars(ours)) == ["__wrapped__"]


def test_what_a_patched_megatron_has_decorated_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = decorators.around_forward_step(schedules.forward_step)
    monkeypatch.setattr(schedules, "forward_step", there)
    offload = install(OffloadConfig(mode="ssd", directories=(tmp_path,)), model())
    assert schedules.forward_step is there
    assert decorators.is_decorated(schedules.backward_step)
    offload.close()
    assert schedules.forward_step is there
    assert not decorators.is_decorated(schedules.backward_step)


def test_a_pass_that_no_backward_follows_is_an_evaluation_s() -> None:
    """Only the pass that comes next, and only where the schedule has said it."""
    step = decorators.around_forward_step(lambda: "Megatron's")
    check = decorators.around_first_val_step(schedules.check_first_val_step)
    hooks: Any = SimpleNamespace(
        forward_step=lambda *_: "ours", evaluation_step=lambda step, args, kwargs: step()
    )
    decorators.connect(hooks)
    try:
        assert step() == "ours"
        assert check(None, False, True) is True and step() == "ours"
        assert check(False, True, True) is False and step() == "Megatron's"
        assert step() == "ours"
    finally:
        decorators.connect(None)


def backward_of_0_16(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
) -> Any:
    return input_tensor, output_tensor, output_tensor_grad, model_type, config


def backward_of_0_19(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
) -> Any:
    return input_tensor, output_tensor, output_tensor_grad, config


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (backward_of_0_16, (None, "loss", None, "encoder_or_decoder", "settings")),
        (backward_of_0_19, (None, "loss", None, "settings")),
    ],
)
def test_layer_major_steps_run_the_backward_step_of_each_version(
    step: Callable[..., Any], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    @functools.wraps(step)
    def noting(**arguments: Any) -> None:
        ran.append(step(**arguments))

    decorated = decorators.around_backward_step(noting)
    monkeypatch.setattr(schedules, "backward_step", decorated)
    hooks: Any = SimpleNamespace(
        _model=SimpleNamespace(model_type="encoder_or_decoder"), _settings="settings"
    )
    LayerMajorHooks._backward(hooks, ("loss", 3))
    assert ran == [expected]


def unit_by_unit(model: torch.nn.Module, told: list[object]) -> Callable[[], None]:
    """Hooks of layer-major steps on a model's layers, and what takes them off again."""
    hooks = LayerMajorHooks(
        LayerMajorConfig(units=2), model, SimpleNamespace(), None, None, lambda: None
    )
    cast(Any, hooks._schedule).enter_layer = lambda layer, _: told.append(layer)
    return hooks.close


def divided(model: torch.nn.Module, told: list[object]) -> Callable[[], None]:
    """The same of layers that are divided."""
    division = LayerDivision(model)
    watching = contextlib.ExitStack()
    watching.enter_context(division.watching(lambda tensors, _: told.append(tensors)))
    watching.callback(division.close)
    return watching.close


class DividedLayer(torch.nn.Module):
    """Has the middle at which `LayerDivision` divides."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_mlp_layernorm = torch.nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.pre_mlp_layernorm(x)
        return result


@pytest.mark.parametrize("hooked_by", [unit_by_unit, divided])
def test_copies_and_pickles_of_a_model_have_hooks_that_do_nothing(
    hooked_by: Callable[..., Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told = torch.nn.Sequential(DividedLayer(), DividedLayer()), []
    names = {layer: f"decoder.{number}" for number, layer in enumerate(model, 1)}
    monkeypatch.setattr(layer_hooks, "layer_names", lambda _: names)
    x = torch.randn(3, 2, requires_grad=True) * 2  # layers are divided where autograd is
    expected = model(x)
    close = hooked_by(model, told)
    assert torch.equal(model(x), expected)
    assert len(told) == 2
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)
    assert len(told) == 2, "a copy tells of its passes as if it were the model"
    close()
    model(x)
    assert len(told) == 2


@pytest.mark.parametrize("version", [*SUPPORTED_VERSIONS, "0.19.1+5be9626709"])
def test_a_checkouts_version_may_name_its_commit(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.__version__", version)
    check_version()


@pytest.mark.parametrize("version", ["0.19.3", "0.19.1rc0", "0.16.10", "0.16.1.dev1+abc"])
def test_a_version_that_only_looks_alike_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(ConfigurationError, match="is not supported"):
        check_version()


def settings(**changes: Any) -> SimpleNamespace:
    defaults = {
        "num_layers": 24,
        "hidden_size": 1024,
        "ffn_hidden_size": 4096,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "kv_channels": 64,
        "gated_linear_unit": False,
        "bf16": True,
        "fp16": False,
        "hidden_dropout": 0.1,
        "sequence_parallel": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
    }
    return SimpleNamespace(**{**defaults, **changes})


def test_the_estimate_is_the_papers_34_sbh_and_its_parallel_forms() -> None:
    tokens, hidden = 2048, 1024  # Korthikanti et al. 2022, equations 1 to 4, without the scores
    assert layer_bytes(settings(), tokens) == 34 * tokens * hidden
    tensor = settings(tensor_model_parallel_size=2)
    assert layer_bytes(tensor, tokens) == (10 + 24 / 2) * tokens * hidden
    sequence = settings(tensor_model_parallel_size=2, sequence_parallel=True)
    assert layer_bytes(sequence, tokens) == 34 / 2 * tokens * hidden


@pytest.mark.parametrize(
    ("stages", "chunks", "num_microbatches", "passes"),
    [
        (1, None, 8, [1]),
        (4, None, 8, [4, 3, 2, 1]),
        (4, None, 2, [2, 2, 2, 1]),
        (2, 2, 4, [5, 3]),
        (2, 2, 2, [4, 3]),
        (4, 2, 8, [11, 9, 7, 5]),
    ],
)
def test_a_stage_holds_fewer_passes_the_later_it_is(
    stages: int, chunks: int | None, num_microbatches: int, passes: list[int]
) -> None:
    layout = settings(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks
    )
    one_pass = MARGIN * (24 // (stages * (chunks or 1))) * layer_bytes(layout, 512 * 4)
    for stage, count in enumerate(passes):
        reserve = activation_bytes(layout, 512, 4, num_microbatches, stage)
        assert reserve == pytest.approx(count * one_pass, rel=1e-6)


@pytest.mark.parametrize(
    ("uneven", "chunks", "num_layers"),
    [
        ({"num_layers_in_first_pipeline_stage": 3}, None, [4 * 3, 3 * 7, 2 * 7, 7]),
        ({"num_layers_in_last_pipeline_stage": 9}, None, [4 * 5, 3 * 5, 2 * 5, 9]),
        (
            {"num_layers": 22, "account_for_embedding_in_pipeline_split": True}
            | {"account_for_loss_in_pipeline_split": True},
            None,
            [4 * 5, 3 * 6, 2 * 6, 5],
        ),
        ({"num_layers": 22}, None, [4 * 6, 3 * 6, 2 * 6, 6]),  # Megatron builds no such model
        (  # passes of the first chunk times its layers, and of the second
            {"pipeline_model_parallel_layout": "Et*1|t*2|t*2|t*2|t*2|t*5|t*5|t*5L"},
            2,
            [7 * 1 + 4 * 2, 5 * 2 + 4 * 5, 4 * 2 + 3 * 5, 4 * 2 + 1 * 5],
        ),
    ],
    ids=["first", "last", "embedding and loss", "not divisible", "layout"],
)
def test_an_uneven_pipeline_reserves_for_the_layers_that_a_stage_has(
    uneven: dict[str, Any], chunks: int | None, num_layers: list[int]
) -> None:
    text = uneven.get("pipeline_model_parallel_layout")
    if text is not None:
        parsed = PipelineParallelLayerLayout(text, pipeline_model_parallel_size=4)
        uneven = {"pipeline_model_parallel_layout": parsed}
    layout = settings(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=chunks, **uneven
    )
    one = MARGIN * layer_bytes(layout, 512 * 4)
    found = [activation_bytes(layout, 512, 4, 8, stage) / one for stage in range(4)]
    assert found == pytest.approx(num_layers, rel=1e-6)


@pytest.mark.parametrize("order", ["ascending", "alternating"])
def test_a_layer_major_step_holds_all_micro_batches_of_all_units_but_the_last(order: str) -> None:
    layout, steps = settings(), LayerMajorConfig(units=5, order=order)
    sizes = [5, 5, 5, 5, 4]  # layers of units
    layers = 8 * sum(sizes[:-1]) + sizes[-1]
    found = activation_bytes(layout, 512, 4, 8, layer_major=steps)
    assert found == int(MARGIN * layers * layer_bytes(layout, 512 * 4))
    one_unit = activation_bytes(layout, 512, 4, 8, layer_major=LayerMajorConfig(units=1))
    assert one_unit == activation_bytes(layout, 512, 4, 8)
    with pytest.raises(ConfigurationError, match="--layer-major-units 25: the model has 24 layers"):
        activation_bytes(layout, 512, 4, 8, layer_major=LayerMajorConfig(units=25))


def test_layers_that_put_nothing_on_a_tier_do_not_count_in_a_layer_major_step(
    tmp_path: Path,
) -> None:
    layout, tokens = settings(), 512 * 4

    def found(**flags: Any) -> int:
        config = OffloadConfig(mode="ssd", directories=(tmp_path,), **flags)
        steps = LayerMajorConfig(units=24)
        return activation_bytes(layout, 512, 4, 8, config=config, layer_major=steps)

    layers, inputs = layer_bytes(layout, tokens), tokens * 1024 * 2
    upper = LayerSet.parse("1-12")
    assert found(offload_layers=upper) == int(MARGIN * 8 * 12 * layers)
    rest = 8 * 11 * layers + layers
    assert found(recompute_layers=upper) == int(MARGIN * rest)
    both = found(recompute_layers=upper, recompute_input="ssd")
    assert both == int(MARGIN * (rest + 8 * 12 * inputs))


def test_context_parallel_ranks_share_a_sample() -> None:
    whole = activation_bytes(settings(), 2048, 1, 1)
    assert activation_bytes(settings(context_parallel_size=2), 2048, 1, 1) == whole // 2


@pytest.mark.parametrize(
    ("changes", "model", "division"),
    [
        ({}, {}, {}),
        ({"hidden_dropout": 0.0, "bf16": False}, {"hidden_dropout": 0.0, "dtype": "fp32"}, {}),
        (
            {"num_query_groups": 4, "gated_linear_unit": True, "bias_activation_fusion": True},
            {"num_query_groups": 4, "gated": True},
            {},
        ),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {},
            {"tensor": 2, "sequence_parallel": True},
        ),
    ],
    ids=["plain", "fp32", "gated, grouped queries", "TP2+SP"],
)
def test_what_a_layer_saves_is_counted_as_plan_counts_it(
    changes: dict[str, Any], model: dict[str, Any], division: dict[str, Any]
) -> None:
    layout = settings(**changes)
    sizes = {"hidden_dropout": 0.1, "ffn_hidden_size": layout.ffn_hidden_size, **model}
    work = layer_work(Transformer(24, 1024, 16, 2048, **sizes), Parallelism(**division))
    saved = {one.name: one.num_bytes for part in work for one in part.saved}
    total = sum(one.num_bytes for part in work for one in part.saved)
    assert layer_bytes(layout, 2048) == total - saved["log-sum-exp"]


def test_a_gated_unit_that_no_kernel_computes_saves_its_halves_once_more() -> None:
    fused, alone = (
        layer_bytes(settings(gated_linear_unit=True, bias_activation_fusion=one), 2048)
        for one in (True, False)
    )
    masks = 2 * 2048 * 1024  # of dropout, which torch then saves in the element's type
    assert alone - fused == 2 * 2048 * 4096 * 2 + masks


def test_experts_save_what_each_of_them_gets() -> None:
    tokens, hidden = 2048, 1024
    experts = settings(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=2048)
    # 34 s h with an MLP four times as wide as h, of which 16; two that are twice as wide have as
    # much. Two bytes for each copy of a token, before its expert and behind it.
    assert layer_bytes(experts, tokens) == (34 + 2 * 2 * 2) * tokens * hidden


def test_the_stage_of_a_rank_changes_last() -> None:
    layout = settings(pipeline_model_parallel_size=2)
    assert [stage_of(rank, 4, layout) for rank in range(4)] == [0, 0, 1, 1]


def test_of_layers_that_megatron_recomputes_the_estimate_counts_inputs() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    tokens = 512 * 4
    of_input = tokens * 1024 * 2
    for number, inputs in ((1, 24), (4, 6), (5, 5)):
        layout = settings(**full, recompute_num_layers=number)
        assert activation_bytes(layout, 512, 4, 1) == int(MARGIN * inputs * of_input)
    sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layout = settings(**full, **sequence, recompute_num_layers=1)
    assert activation_bytes(layout, 512, 4, 1) == int(MARGIN * 24 * of_input / 2)
    layout = settings(**{**full, "recompute_method": "block"}, recompute_num_layers=10)
    rest = 14 * layer_bytes(layout, tokens)
    assert activation_bytes(layout, 512, 4, 1) == int(MARGIN * (10 * of_input + rest))
