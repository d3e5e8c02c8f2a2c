# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are its layers, and what they are called."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import ConfigurationError
from megatron.offload.integration.torch.layers import find_layers


class Block(torch.nn.Module):
    def __init__(self, num_experts: int = 0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        if num_experts:
            self.experts = torch.nn.ModuleList(Block() for _ in range(num_experts))


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


@pytest.mark.parametrize("layers", [[Block], ["Block"], ["blocks.*"], ["blocks.0", "blocks.1"]])
def test_layers_may_be_named(layers):
    assert names(stack(Block(), Block()), layers=layers) == ["blocks.0", "blocks.1"]


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="layers='Blok' names no module"):
        names(stack(Block(), Block()), layers=["Blok"])
