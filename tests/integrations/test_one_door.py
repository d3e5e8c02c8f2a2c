# SPDX-License-Identifier: Apache-2.0
"""`offload`: one door for what a training keeps in memory, and one handle for what is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    LayerMajor,
    offload,
    offload_activations,
    offload_parameters,
)
from tests.support.layer_major import one_by_one
from tests.support.training import Stack

HIDDEN, LAYERS, MICRO_BATCHES, STEPS = 32, 4, 2, 3
SMALL = {"min_bytes": 1, "io": "buffered"}
STATES = {"bucket_bytes": 1 << 14, "window_bytes": 0}


def made() -> tuple[Stack, torch.optim.Optimizer]:
    model = Stack(HIDDEN, LAYERS, MICRO_BATCHES)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: Stack, optimizer: torch.optim.Optimizer, handle: Any = None) -> list[Any]:
    """Losses, in the handle's layer-major steps if it has such, and weights."""
    torch.manual_seed(7)
    draw = torch.Generator().manual_seed(5)
    found: list[Any] = []
    for _ in range(STEPS):
        batches = [torch.randn(2, 8, HIDDEN, generator=draw) for _ in range(MICRO_BATCHES)]
        if handle is not None and handle.layer_major is not None:
            found += handle.step(batches, model)
        else:
            found += one_by_one(model, batches)
        optimizer.step()
        optimizer.zero_grad()
    return found


def weights(model: Stack) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


EVERYTHING: dict[str, dict[str, Any]] = {
    "activations and states": {"activations": SMALL, "optimizer_states": STATES},
    "in host memory": {
        "activations": {**SMALL, "mode": "host"},
        "optimizer_states": {**STATES, "mode": "host"},
        "parameters": "host",
    },
    "all, unit by unit": {
        "activations": {**SMALL, "boundary": "ssd"},
        "optimizer_states": STATES,
        "parameters": True,
        "gradients": True,
        "layer_major": 2,
    },
    "parameters alone": {"activations": False, "optimizer_states": "off", "parameters": "ssd"},
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_bit_is_the_same_and_each_stream_moves(name: str, tmp_path: Path) -> None:
    plain, plain_optimizer = made()
    expected = trained(plain, plain_optimizer)
    model, optimizer = made()
    with offload(model, optimizer, tmp_path, **EVERYTHING[name]) as handle:
        found = trained(model, optimizer, handle)
        moved = handle.statistics
        report = handle.report()
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, weights(model), weights(plain)))
    streams = {"activations", "optimizer_states", "parameters"}
    assert moved.keys() == {one for one in streams if getattr(handle, one) is not None}, (
        "a stream was left out"
    )
    for one in moved.values():
        assert one.get("offloaded_bytes", one["written_bytes"]) > 0
    assert report
    # As if it had never been.
    assert not list(tmp_path.iterdir())
    assert "step" not in vars(optimizer)
    assert trained(model, optimizer)[-1].equal(trained(plain, plain_optimizer)[-1])


def test_a_directory_and_an_optimizer_are_all_that_is_needed(tmp_path: Path) -> None:
    model, optimizer = made()
    with offload(model, optimizer, tmp_path) as handle:
        assert handle.activations is not None and handle.optimizer_states is not None
        assert handle.parameters is None and handle.layer_major is None
        trained(model, optimizer, handle)
        assert "optimizer states" in handle.report()
        assert handle.summary()
    with offload(model) as handle:  # to host memory
        assert handle.optimizer_states is None and handle.statistics == {"activations": {}}


def test_a_stream_may_say_itself_which_layers_are_meant(tmp_path: Path) -> None:
    plain, plain_optimizer = made()
    expected = trained(plain, plain_optimizer)
    model, optimizer = made()
    with offload(
        model,
        optimizer,
        tmp_path,
        activations={**SMALL, "layers": ["layers.*"]},
        parameters={"layers": ["layers.0", "layers.1"]},
        layers=["layers.2"],  # of the streams that say nothing
    ) as handle:
        assert all(map(torch.equal, trained(model, optimizer, handle), expected))
        assert handle.activations is not None and handle.parameters is not None
        assert len(handle.activations.layers) == LAYERS
        assert handle.parameters.window is not None
        assert len(handle.parameters.window.units) == 2
    with offload(
        model, directory=tmp_path, activations=False, parameters={"units": 2}, layer_major=2
    ) as handle:
        assert handle.parameters is not None and handle.parameters.window is not None
        assert len(handle.parameters.window.units) == 2


class Strict(torch.nn.Parameter):
    """Refuses functions of torch that its library has not thought of, as HypLL's parameters do."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.is_inference, torch.Tensor.register_post_accumulate_grad_hook):
            raise TypeError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameters_that_refuse_functions_of_torch_train(tmp_path: Path) -> None:
    def strict() -> tuple[Stack, torch.optim.Optimizer]:
        model, _ = made()
        for layer in model.layers:
            for module in layer.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    setattr(module, name, Strict(param.detach()))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    plain, plain_optimizer = strict()
    expected = trained(plain, plain_optimizer)
    model, optimizer = strict()
    again = {**SMALL, "recompute_layers": "all"}
    with offload(model, optimizer, tmp_path, activations=again, optimizer_states=STATES) as handle:
        assert all(map(torch.equal, trained(model, optimizer, handle), expected))
        assert handle.statistics["activations"]["recomputed_layers"] == LAYERS
        assert handle.statistics["optimizer_states"]["read_bytes"] > 0
    assert all(map(torch.equal, weights(model), weights(plain)))


def test_what_was_opened_before_an_error_is_closed(tmp_path: Path) -> None:
    model = Stack(HIDDEN, LAYERS, MICRO_BATCHES)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigurationError, match="LBFGS cannot be offloaded"):
        offload(model, optimizer, tmp_path, parameters=True)
    assert not list(tmp_path.iterdir())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    with offload(model, directory=tmp_path, parameters=True) as handle:  # no handle is left over it
        assert handle.parameters is not None


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(ConfigurationError, match=r"optimizer_states= needs the optimizer"):
        offload(model, directory=tmp_path, optimizer_states=True)
    for settings in ({"parameters": True}, {"layer_major": True}):
        with pytest.raises(ConfigurationError, match=r"gradients=True needs parameters= and layer"):
            offload(model, optimizer, tmp_path, gradients=True, **settings)  # type: ignore[arg-type]
    with (
        offload(model, optimizer, tmp_path) as handle,
        pytest.raises(ConfigurationError, match=r"which offload\(\) was not asked for"),
    ):
        handle.step([], model)
    with pytest.raises(ConfigurationError, match=r"sdd"):
        offload(model, optimizer, tmp_path, activations="sdd")


def test_all_is_closed_though_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    handle = offload(model, optimizer, tmp_path, parameters=True)
    assert handle.optimizer_states is not None

    def fail(**_: Any) -> None:
        raise ZeroDivisionError

    close = handle.optimizer_states.close
    monkeypatch.setattr(handle.optimizer_states, "close", fail)
    with pytest.raises(ZeroDivisionError):
        handle.close()
    close()
    assert not list(tmp_path.iterdir())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda model, _: offload_activations(model.optimizer), "AdamW is no torch.nn.Module"),
        (lambda model, _: offload_activations(None), "NoneType is no torch.nn.Module"),
        (lambda model, _: offload_activations([model, 5]), "int is no torch.nn.Module"),
        (lambda model, at: offload_parameters(None, at), "parameters: NoneType is no torch"),
        (lambda model, _: LayerMajor(model.optimizer), "layer-major steps: AdamW is no torch"),
        (
            lambda model, at: offload_parameters(model, at, units=100),
            f"layer-major steps: units 100: the model has {LAYERS} layers that can be divided; "
            f"give a number from 1 to {LAYERS}",
        ),
        (lambda model, _: LayerMajor(model, 100), "layer-major steps: units 100: the model has"),
        (
            lambda model, at: offload_parameters(torch.nn.Linear(2, 2), at),
            "parameters: the model has no layers that repeat; name them with layers=",
        ),
    ],
)
def test_a_wrong_argument_is_named_as_the_caller_gave_it(
    call: Callable[[Any, Path], object], says: str, tmp_path: Path
) -> None:
    model, optimizer = made()
    model.optimizer = optimizer  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as error:
        call(model, tmp_path)
    assert says in str(error.value) and "--" not in str(error.value)
