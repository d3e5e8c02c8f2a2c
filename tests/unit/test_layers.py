# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are its layers, and what they are called."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations
from megatron.offload.integration.torch.layers import find_layers


class Block(torch.nn.Module):
    def __init__(self, num_experts: int = 0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        if num_experts:
            self.experts = torch.nn.ModuleList(Block() for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Layerless(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def run(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for first, second in model.blocks:
        x = second(first(x) + x)
    return x


class GradientCheckpointingLayer(torch.nn.Module):
    """Called as in transformers."""


class Layer(GradientCheckpointingLayer):
    pass


def names(*models: torch.nn.Module, layers: list[str | type[torch.nn.Module]] | None = None):
    return list(find_layers(models, layers).values())


def stack(*blocks: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    model.first = torch.nn.Linear(2, 2)
    model.blocks = torch.nn.ModuleList(blocks)
    return model


def test_modules_of_one_class_in_a_list_are_layers():
    assert names(stack(Block(), Block())) == ["blocks.0", "blocks.1"]
    assert names(torch.nn.Sequential(Block(), Block(), torch.nn.Linear(2, 2))) == ["0", "1"]


def test_what_repeats_inside_of_a_layer_is_none():
    assert names(stack(Block(num_experts=2), Block(num_experts=2))) == ["blocks.0", "blocks.1"]


def test_one_module_and_modules_without_parts_are_none():
    assert names(stack(Block())) == []
    assert names(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == []


def test_layers_of_transformers_are_known_by_their_class():
    assert names(stack(Layer(), Block(), Block())) == ["blocks.0"]


def test_wrappers_are_no_part_of_a_name():
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Module()
    wrapper.module._orig_mod = stack(Block(), Block())
    assert names(wrapper) == ["blocks.0", "blocks.1"]


def test_several_models_have_numbers():
    assert names(stack(Block(), Block()), stack(Layer())) == ["1.blocks.0"]
    both = names(stack(Block(), Block()), stack(Block(), Block()))
    assert both == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]


@pytest.mark.parametrize("layers", [None, ["blocks.*"], ["blocks.[01]"]])
def test_lists_and_dicts_of_parts_are_no_layers_but_their_parts_are(layers):
    def parts() -> torch.nn.Module:
        return torch.nn.ModuleList([Block(), Layerless(), torch.nn.Identity()])

    assert names(stack(parts(), parts()), layers=layers) == [
        *("blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1")
    ]
    both = torch.nn.ModuleDict({"a": Block(), "b": parts()})
    found = names(stack(both, torch.nn.ModuleDict({"a": Block()})), layers=layers)
    assert found == ["blocks.0.a", "blocks.0.b.0", "blocks.0.b.1", "blocks.1.a"]


def test_parts_of_layers_move_and_run_again_where_lists_hold_them():
    model = stack(*(torch.nn.ModuleList([Block(), Layerless()]) for _ in range(3)))
    model.forward = lambda x: run(model, x)
    x = torch.ones(4, 2)
    run(model, x).sum().backward()
    expected = [one.grad.clone() for one in model.parameters()]
    for one in model.parameters():
        one.grad = None
    with offload_activations(model, mode="host", min_bytes=1, recompute_layers="all") as offload:
        model(x).sum().backward()
        assert offload.statistics["recomputed_layers"] == 6
    assert all(map(torch.equal, expected, (one.grad for one in model.parameters())))


@pytest.mark.parametrize("layers", [[Block], ["Block"], ["blocks.*"], ["blocks.0", "blocks.1"]])
def test_layers_may_be_named(layers):
    assert names(stack(Block(), Block()), layers=layers) == ["blocks.0", "blocks.1"]


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="layers='Blok' names no module"):
        names(stack(Block(), Block()), layers=["Blok"])


def test_what_torchscript_runs_is_no_layer() -> None:
    scripted, traced = torch.jit.script(Block()), torch.jit.trace(Block(), torch.ones(2))
    blocks = [Block(), scripted, Block(), traced]
    model = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(*blocks)})
    assert list(find_layers([model]).values()) == ["blocks.0", "blocks.2"]
    assert not find_layers([torch.nn.Sequential(scripted, torch.jit.script(Block()))])
    with pytest.raises(ConfigurationError, match=r"names blocks\.1, which is TorchScript"):
        find_layers([model], ["blocks.*"])


def test_layers_that_are_refused_are_told_in_the_order_of_the_model() -> None:
    blocks = torch.nn.Sequential(*(torch.jit.script(Block()) for _ in range(16)))
    with pytest.raises(ConfigurationError, match=r"names 0, which is TorchScript"):
        find_layers([blocks], ["[0-9]*"])
