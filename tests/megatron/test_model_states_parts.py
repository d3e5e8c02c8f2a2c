# SPDX-License-Identifier: Apache-2.0
"""Offload of a Megatron optimizer's states, part by part: flags, when reads begin, what is refused,
optimizers that are not installed here. Whole trainings: test_model_states.py.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError
from megatron.offload.errors import InterruptedStepError
from megatron.offload.integration.megatron import offload_model_states, refused
from megatron.offload.integration.megatron.arguments import (
    add_offload_arguments,
    states_config_from_args,
)
from megatron.offload.integration.megatron.last_backward import LastBackward
from megatron.offload.integration.megatron.state_settings import (
    check_state_settings,
)
from megatron.offload.states.config import StatesConfig

HOST = StatesConfig(mode="host", host_budget=1 << 26, bucket_bytes=1, window_bytes=0)

# ------------------------------------------------------------------ flags


def config_of(*flags: str) -> StatesConfig:
    parser = add_offload_arguments(argparse.ArgumentParser())
    return states_config_from_args(parser.parse_args(flags))


def test_states_go_where_activations_go_if_nothing_else_is_said() -> None:
    asked = ("--optimizer-state-offload", "ssd", "--activation-offload-dir", "a,b")
    more = ("--activation-offload-threads", "3")
    config = config_of(*asked, *more)
    assert config.directories == (Path.cwd() / "a", Path.cwd() / "b") and config.threads == 3
    own = config_of(*asked, *more, "--optimizer-state-dir", "c", "--optimizer-state-threads", "2")
    assert own.directories == (Path.cwd() / "c",) and own.threads == 2
    assert not config_of("--activation-offload-dir", "a").enabled


# ------------------------------------------------------------------ when reads begin


def forward_step(name: str, num_microbatches: int) -> str:
    return f"forward {name}"


def backward_step(name: str) -> str:
    return f"backward {name}"


class Schedule:
    """Passes of a stage, and what was heard of them.

    Args:
        num_chunks: of the model, on this stage.
    """

    def __init__(self, num_chunks: int = 1, hooks: Any = None) -> None:
        self.heard: list[str] = []
        self.hooks = LastBackward(lambda: self.heard.append("begins"), num_chunks, hooks)

    def run(self, order: str, num_microbatches: int) -> list[str]:
        """What was heard while passes ran in this order: F and B."""
        self.heard = []
        for kind in order:
            if kind == "F":
                args, kwargs = ("",), {"num_microbatches": num_microbatches}
                self.heard.append(self.hooks.forward_step(forward_step, args, kwargs))
            else:
                self.heard.append(self.hooks.backward_step(backward_step, ("",), {}))
        return self.heard


@pytest.mark.parametrize(
    ("order", "num_microbatches", "num_chunks"),
    [("FB", 1, 1), ("FBFBFB", 3, 1), ("FFBFBB", 3, 1), ("FFFFBFBFBBBB", 3, 2)],
)
def test_reads_begin_just_before_the_last_backward_pass_of_each_step(
    order: str, num_microbatches: int, num_chunks: int
) -> None:
    schedule = Schedule(num_chunks)
    for _ in range(2):
        heard = schedule.run(order, num_microbatches)
        assert heard.count("begins") == 1
        assert heard[-2:] == ["begins", "backward "]


def test_evaluation_and_a_step_that_was_cut_short_begin_nothing() -> None:
    schedule = Schedule()
    with torch.no_grad():
        assert schedule.run("F", 1) == ["forward "]
    assert "begins" not in schedule.run("FBF", 3)
    schedule.hooks.clear()
    assert schedule.run("FFBB", 2)[-2:] == ["begins", "backward "]


def test_other_hooks_run_what_passes() -> None:
    class Hooks:
        def layer(self, forward: Any, layer: Any, args: Any, kwargs: Any) -> str:
            return "hooked layer"

        def forward_step(self, step: Any, args: Any, kwargs: Any) -> str:
            return "hooked " + step(*args, **kwargs)

        def backward_step(self, step: Any, args: Any, kwargs: Any) -> str:
            return "hooked " + step(*args, **kwargs)

    schedule = Schedule(hooks=Hooks())
    assert schedule.run("FB", 1) == ["hooked forward ", "begins", "hooked backward "]
    assert schedule.hooks.layer(lambda layer: "layer", None, (), {}) == "hooked layer"
    assert Schedule().hooks.layer(lambda layer: "layer", None, (), {}) == "layer"


# ------------------------------------------------------------------ stand-ins for Megatron's


def settings(**changes: Any) -> SimpleNamespace:
    """What is read of an OptimizerConfig."""
    return SimpleNamespace(**{"optimizer": "adam", **changes})


class FP32Optimizer:
    """Megatron's, as far as it is looked at."""

    is_stub_optimizer = False

    def __init__(self, inner: torch.optim.Optimizer, **changes: Any) -> None:
        self.optimizer = inner
        self.config = settings(**changes)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def reload_model_params(self) -> None:
        """Megatron's does nothing, where parameters are their own main weights."""

    def offload_to_cpu(self) -> None:
        raise AssertionError("it would move what is not there")


class ChainedOptimizer:
    """Of several."""

    def __init__(self, *members: Any) -> None:
        self.chained_optimizers = members


class DistributedOptimizer(FP32Optimizer):
    """With main weights inside of its inner optimizer, which reads decoupled gradients."""

    def _copy_main_params_to_model_params(self) -> None:
        for own, model in (
            ("shard_fp32_from_float16_groups", "model_float16_groups"),
            ("shard_fp32_groups", "model_fp32_groups"),
        ):
            for main, of_model in zip(getattr(self, own), getattr(self, model), strict=True):
                for one, other in zip(main, of_model, strict=True):
                    other.data.copy_(one)


class FusedAdam(torch.optim.Optimizer):
    """As Transformer Engine's, for bf16: main weights are states, and groups count steps.

    A group without parameters counts none.
    """

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["master_param"] = param.detach().float()
                gradient = param.decoupled_grad
                state["exp_avg"].lerp_(gradient, 0.1 / group["step"])
                state["master_param"].sub_(group["lr"] * state["exp_avg"])
                param.data.copy_(state["master_param"])


def weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in ((8, 3), (5,), (4, 4))]


def test_main_weights_inside_of_the_inner_optimizer_move_with_its_states() -> None:
    """Precision-aware: bf16 parameters, fp32 gradients beside them, steps counted by group."""

    def trained(config: StatesConfig) -> tuple[Any, ...]:
        params = weights(torch.bfloat16)
        inner = FusedAdam([{"params": params[:2]}, {"params": params[2:]}])
        optimizer = DistributedOptimizer(
            inner,
            use_precision_aware_optimizer=True,
            use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
            exp_avg_dtype=torch.bfloat16,
            store_param_remainders=False,
        )
        states = offload_model_states(config, optimizer)
        draw = torch.Generator().manual_seed(1)
        for step in range(4):
            for param in params:
                param.decoupled_grad = torch.randn(param.shape, generator=draw)  # type: ignore[attr-defined]
            inner.step()
            if config.enabled:
                assert [group["step"] for group in inner.param_groups] == [step + 1] * 2
                masters = [inner.state[param]["master_param"] for param in params]
                assert all(one.device.type == "meta" for one in masters)
        moved = states.statistics.get("read_bytes", 0)
        states.close()
        found = [(key, one) for p in params for key, one in inner.state[p].items()]
        return params, found, moved

    off, on = trained(StatesConfig()), trained(HOST)
    assert all(map(torch.equal, off[0], on[0]))
    assert [key for key, _ in off[1]] == [key for key, _ in on[1]]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(off[1], on[1], strict=True))
    assert on[2] > 0


def test_main_weights_go_to_the_model_at_once_and_the_models_own_stay() -> None:
    model = [one.to(torch.bfloat16) for one in weights()[:2]]
    main, own = [one.float() for one in model], weights()[2]
    expected = [one.clone() for one in (*main, own)]
    plain = torch.optim.Adam(expected)
    optimizer = DistributedOptimizer(torch.optim.Adam([own, *main]))
    optimizer.model_float16_groups = [model]  # type: ignore[attr-defined]
    optimizer.shard_fp32_from_float16_groups = [main]  # type: ignore[attr-defined]
    optimizer.model_fp32_groups = optimizer.shard_fp32_groups = [[own]]  # type: ignore[attr-defined]
    states = offload_model_states(HOST, optimizer)
    for _ in range(2):
        for one, other in zip((*main, own), expected, strict=True):
            one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
        plain.step()
        optimizer.optimizer.step()
        assert all(torch.isnan(one).all() for one in main)
        optimizer._copy_main_params_to_model_params()  # as Megatron does after each step
        assert torch.equal(own, expected[2])
        for one, other in zip(model, expected[:2], strict=True):
            assert torch.equal(one, other.to(torch.bfloat16))
    states.close()
    assert all(map(torch.equal, main, expected))


def test_after_an_interrupted_step_copied_weights_are_not_enough_to_go_on() -> None:
    """Main weights are the model's again; exp_avg of some parameters is still a step ahead."""

    class Interrupted(torch.optim.Adam):
        at: torch.Tensor | None = None

        def step(self, closure: Any = None) -> Any:
            if any(param is self.at for group in self.param_groups for param in group["params"]):
                raise KeyboardInterrupt
            return super().step(closure)

    Interrupted.__name__ = "Adam"  # no other is known
    params = weights()
    optimizer = FP32Optimizer(Interrupted(params))
    states = offload_model_states(HOST, optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.optimizer.at = params[1]  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        optimizer.optimizer.step()
    optimizer.optimizer.at = None  # type: ignore[attr-defined]
    optimizer.reload_model_params()
    for go_on in (optimizer.optimizer.step, optimizer.state_dict):
        with pytest.raises(InterruptedStepError):
            go_on()
    optimizer.load_state_dict(saved)
    optimizer.reload_model_params()
    optimizer.optimizer.step()
    assert [int(state["step"]) for state in optimizer.state_dict()["state"].values()] == [2] * 3
    states.close()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_states_with_types_of_their_own_are_counted_by_these_types(kind: torch.dtype) -> None:
    """Buckets are cut, and windows bounded, by bytes that are known before the first step."""

    params = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(6)]
    inner = FusedAdam(params)
    inner.master_weights = True  # type: ignore[attr-defined]
    inner.name_to_dtype_map = {  # type: ignore[attr-defined]
        "exp_avg": kind,
        "exp_avg_sq": kind,
        "master_param": torch.float32,
    }
    of_one = 1000 * (2 * kind.itemsize + 4)
    config = dataclasses.replace(HOST, bucket_bytes=2 * of_one)
    states = offload_model_states(
        config,
        DistributedOptimizer(
            inner,
            use_precision_aware_optimizer=True,
            use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
        ),
    )
    (moved,) = states.states
    assert [len(bucket.params) for bucket in moved.buckets] == [2, 2, 2]
    assert moved.expected_bytes == 6 * of_one
    states.close()


def test_buckets_follow_the_model_and_not_the_groups() -> None:
    """Of weights and of biases, as Megatron makes them: a layer's come to lie side by side."""
    params = [torch.nn.Parameter(torch.zeros(8)) for _ in range(6)]
    gradients = torch.zeros(6, 8)
    for param, gradient in zip(params, gradients, strict=True):
        param.main_grad = gradient  # type: ignore[attr-defined]
    groups = [{"params": params[::2]}, {"params": params[1::2]}]
    config = dataclasses.replace(HOST, bucket_bytes=4 * 8 * 4)
    states = offload_model_states(config, FP32Optimizer(torch.optim.Adam(groups)))
    (moved,) = states.states
    found = [[*map(id, bucket.params)] for bucket in moved.buckets]
    assert found == [[*map(id, params[n : n + 2])] for n in (0, 2, 4)]
    states.close()


def test_optimizers_of_a_chain_share_the_window(tmp_path: Path) -> None:
    members = [FP32Optimizer(torch.optim.Adam(weights()[index:])) for index in (0, 2)]
    sizes = [45 * 4, 16 * 4]
    config = StatesConfig(
        mode="tiered",
        directories=(tmp_path,),
        window_bytes=10_000,
        host_budget=20_000,
        ssd_budget_bytes=1 << 20,
        write_bytes_per_s=1e6,
    )
    states = offload_model_states(config, ChainedOptimizer(*members))
    windows = [one.window_bytes for one in states.states]
    assert windows == [10_000 * size // sum(sizes) for size in sizes]
    states.close()


def test_frozen_models_have_no_states() -> None:
    frozen = FP32Optimizer(None)  # type: ignore[arg-type]
    frozen.is_stub_optimizer = True
    states = offload_model_states(HOST, ChainedOptimizer(frozen))
    assert states.states == []
    # With the names of other ranks' counters: all ranks add them up together.
    assert states.statistics == dict.fromkeys(
        ("bytes", "memory_bytes", "written_bytes", "read_bytes"), 0
    )
    states.close()
    assert offload_model_states(StatesConfig(), "whatever").statistics == {}


def test_close_leaves_the_optimizer_as_it_was() -> None:
    optimizer = FP32Optimizer(torch.optim.Adam(weights()))
    before = dict(vars(optimizer))
    states = offload_model_states(HOST, optimizer)
    assert vars(optimizer).keys() > before.keys()
    states.close()
    assert vars(optimizer) == before


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", refused.STATES.settings)
def test_settings_that_move_or_read_states_themselves_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} cannot be combined with state offload"):
        check_state_settings(settings(**{name: True}))
    check_state_settings(settings(**{name: False}))


AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "muon"}, "optimizer muon cannot be combined"),
        ({**AWARE, "exp_avg_dtype": "fp8"}, "exp_avg_dtype fp8 cannot be combined"),
        ({**AWARE, "exp_avg_sq_dtype": torch.float16}, "exp_avg_sq_dtype float16 cannot be"),
        ({**AWARE, "main_params_dtype": "fp16"}, "main_params_dtype fp16 cannot be combined"),
        ({**AWARE, "store_param_remainders": True}, "store_param_remainders cannot be combined"),
    ],
)
def test_states_that_are_more_than_they_seem_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_state_settings(settings(**changes))
    offloaded = {name: value for name, value in changes.items() if name != "optimizer"}
    check_state_settings(settings(**{**offloaded, **dict.fromkeys(AWARE, False)}))


def named(name: str, kind: type = torch.optim.Adam) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = type(name, (kind,), {})(weights())
    return optimizer


def capturable() -> torch.optim.Optimizer:
    optimizer = named("FusedAdam")
    optimizer.capturable = True  # type: ignore[attr-defined]
    return optimizer


def with_buffers(**changes: bool) -> FP32Optimizer:
    optimizer = FP32Optimizer(torch.optim.Adam(weights()))
    optimizer.ddp_config = SimpleNamespace(**changes)  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: FP32Optimizer(named("TensorParallelMuon")), "TensorParallelMuon cannot be"),
        (lambda: FP32Optimizer(named("HybridDeviceOptimizer")), "HybridDeviceOptimizer cannot be"),
        (lambda: FP32Optimizer(capturable()), "FusedAdam with capturable cannot be combined"),
        (lambda: with_buffers(use_megatron_fsdp=True), "use_megatron_fsdp cannot be combined"),
        (lambda: with_buffers(fp8_param_gather=True), "fp8_param_gather cannot be combined"),
        (
            lambda: ChainedOptimizer(FP32Optimizer(named("Adam"), optimizer_cpu_offload=True)),
            "drop --optimizer-cpu-offload",
        ),
        (lambda: named("LayerWiseDistributedOptimizer"), "LayerWiseDistributedOptimizer cannot"),
    ],
)
def test_optimizers_that_are_not_known_are_refused(build: Callable[[], Any], sentence: str) -> None:
    optimizer = build()
    with pytest.raises(ConfigurationError, match=sentence):
        offload_model_states(HOST, optimizer)


def test_states_that_are_away_are_not_moved_by_others() -> None:
    optimizer = FP32Optimizer(torch.optim.Adam(weights()))
    states = offload_model_states(HOST, optimizer)
    with pytest.raises(ConfigurationError, match="offload_to_cpu of Megatron's optimizer cannot"):
        optimizer.offload_to_cpu()
    states.close()


def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.__version__", "0.99.0")
    with pytest.raises(ConfigurationError, match=r"megatron-core 0\.99\.0 is not supported"):
        offload_model_states(HOST, FP32Optimizer(torch.optim.Adam(weights())))
