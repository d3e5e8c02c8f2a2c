# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of Megatron's own full recomputation keep leaves memory, and comes back in
time; what their layers share, and what runs after them, stays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from megatron.core.tensor_parallel.random import checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadEngine, Scope
from megatron.offload.activations.saved.record import SavedStorage, State
from megatron.offload.integration.megatron.checkpointed_layers import CheckpointedLayers
from tests.support.models import settle

NUMBER, SIZE = 6, 1000  # of checkpoints; elements of what each starts from
NUM_BYTES = 4 * SIZE

pytestmark = pytest.mark.usefixtures("with_cpu_runtime")


class Stack:
    """Checkpoints of some layers each, as a block of Megatron runs them.

    Attributes:
        inputs: the storages that the checkpoints started from.
        again: is called when a checkpoint runs again, with its number.
    """

    def __init__(self, engine: OffloadEngine | None, num_layers: int = 1) -> None:
        self.checkpoints = None if engine is None else CheckpointedLayers(engine)
        self.num_layers = num_layers
        self.inputs: list[StorageWeakRef] = []
        self.again: Callable[[int], None] = lambda number: None
        self.begun: Callable[[int], None] = lambda number: None
        self.is_forward = True

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = x * 1
        for number in range(NUMBER):

            def run(hidden: torch.Tensor, mask: torch.Tensor, number: int = number) -> torch.Tensor:
                if not self.is_forward:
                    self.again(number)
                for layer in range(self.num_layers):
                    if self.is_forward and self.checkpoints is not None:
                        scope = Scope(layer=f"decoder.{number * self.num_layers + layer + 1}")
                        self.checkpoints.begin_layer(scope, [hidden, mask], is_first=not layer)
                        self.begun(number)
                    dropped = torch.nn.functional.dropout(hidden.tanh(), 0.3)
                    with torch.enable_grad():  # as Megatron's bias, dropout and addition
                        hidden = hidden + torch.where(mask, dropped, 0.0)
                return hidden

            self.inputs.append(StorageWeakRef(hidden.untyped_storage()))
            hidden = checkpoint(run, False, hidden, mask)
        loss = hidden.exp().sum()
        if self.checkpoints is not None:
            self.checkpoints.end([loss])
        self.is_forward = False
        return loss

    def alive(self) -> list[int]:
        """The checkpoints whose inputs are in memory."""
        return [number for number, ref in enumerate(self.inputs) if not ref.expired()]


def gradient(stack: Stack, engine: OffloadEngine | None = None) -> torch.Tensor:
    """Of the input, after one step."""
    torch.manual_seed(4)
    x = torch.randn(SIZE, requires_grad=True)
    mask = torch.arange(SIZE) % 3 > 0
    if engine is None:
        stack(x, mask).backward()
    else:
        with engine.step():
            with engine.forward(Scope()) as save_order:
                loss = stack(x, mask)
            settle(engine)
            with engine.backward(save_order):
                loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_inputs_of_checkpoints_move_and_nothing_else(
    num_layers: int, engine: OffloadEngine
) -> None:
    moved = gradient(Stack(engine, num_layers), engine)
    assert torch.equal(moved, gradient(Stack(None, num_layers)))
    found = engine.statistics
    # Not the mask, which all checkpoints save, and not what the loss saved.
    assert (found.offloaded_storages, found.offloaded_bytes) == (NUMBER, NUMBER * NUM_BYTES)
    assert found.read_bytes == NUMBER * NUM_BYTES
    assert found.recomputed_layers == NUMBER * num_layers


def test_in_forward_one_input_at_a_time_is_in_memory(engine: OffloadEngine) -> None:
    stack = Stack(engine)
    alive = []

    def begun(number: int) -> None:
        settle(engine)
        alive.append((number, stack.alive()))

    stack.begun = begun
    gradient(stack, engine)
    assert alive == [(number, [number]) for number in range(NUMBER)]


def test_an_input_is_read_before_its_checkpoint_asks_for_it_and_one_ahead_at_most(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Waits on a busy machine must not widen the window.
    monkeypatch.setattr("megatron.offload.activations.transfer.reader._NOTICEABLE_S", float("inf"))
    stack = Stack(engine)
    records: list[SavedStorage] = []
    come_back: dict[int, list[int]] = {}

    def again(number: int) -> None:
        engine.dispatcher.drain()
        states = enumerate(one.state for one in records[:number])
        come_back[number] = [one for one, state in states if state is not State.ON_TIER]

    stack.again = again
    x = torch.randn(SIZE, requires_grad=True)
    with engine.step():
        with engine.forward(Scope()) as save_order:
            loss = stack(x, torch.arange(SIZE) % 3 > 0)
        settle(engine)
        records += [record for ref in save_order._saves if (record := ref()) is not None]
        assert [one.state for one in records] == [State.ON_TIER] * NUMBER
        with engine.backward(save_order):
            loss.backward()
    assert come_back == {**{number: [number - 1] for number in range(1, NUMBER)}, 0: []}


def test_a_forward_pass_that_raised_leaves_nothing_behind(engine: OffloadEngine) -> None:
    stack = Stack(engine)

    def fail(number: int) -> None:
        if number == 2:
            raise ArithmeticError("no such layer")

    stack.begun = fail
    with pytest.raises(ArithmeticError), engine.step(), engine.forward(Scope()):
        stack(torch.randn(SIZE, requires_grad=True), torch.arange(SIZE) > 0)
    assert stack.checkpoints is not None
    gc.collect()  # the error's frames
    settle(engine)  # a write under way holds its storage
    assert stack.alive() == [2]
    stack.checkpoints.clear()
    assert stack.alive() == []
