# SPDX-License-Identifier: Apache-2.0
"""Parts of a layer-major step: units, calls that pause, counted random numbers."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.offload import ConfigurationError, OffloadEngine
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.integration.engine_passes import EnginePasses
from megatron.offload.integration.megatron import layer_major as megatron_layer_major
from megatron.offload.integration.megatron.layer_major import only_chunk
from megatron.offload.layer_major import random_numbers
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_major.pausable_call import PausableCall, running_call
from megatron.offload.layer_major.random_numbers import TorchGenerators, advanced, num_drawn
from megatron.offload.layer_major.schedule import LayerMajorSchedule
from megatron.offload.layer_major.units import units_of
from megatron.offload.machine.autocast import autocast_depth
from tests.support.models import settle, ssd

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_units", [1, 2, 3, 5, 7])
def test_units_are_consecutive_and_about_equal(num_units: int) -> None:
    units = list(units_of("abcdefg", num_units).values())
    assert units == sorted(units) and set(units) == set(range(num_units))
    sizes = [units.count(unit) for unit in set(units)]
    assert max(sizes) - min(sizes) <= 1


def test_without_a_number_each_layer_is_a_unit() -> None:
    assert units_of("abc", None) == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("value", ["0", "-1", "some"])
def test_units_that_are_no_number_are_refused(value: str) -> None:
    with pytest.raises(ConfigurationError):
        LayerMajorConfig.from_settings({"units": value})


def test_a_call_runs_up_to_its_pauses() -> None:
    seen: list[str] = []

    def function() -> int:
        seen.append("begins")
        call = running_call()
        assert call is not None
        call.pause()
        seen.append("goes on")
        return 7

    call = PausableCall(function, "call", CPU)
    assert not call.go_on() and seen == ["begins"] and running_call() is None
    assert call.go_on() and seen == ["begins", "goes on"]
    assert call.take_result() == 7


def test_a_call_raises_where_it_is_told_to_go_on() -> None:
    def function() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        PausableCall(function, "call", CPU).go_on()


@pytest.mark.parametrize("num_rounds", [0, 1, 2])
def test_an_abandoned_call_ends_where_it_pauses(num_rounds: int) -> None:
    ended = threading.Event()

    def function() -> None:
        call = running_call()
        assert call is not None
        try:
            for _ in range(3):
                call.pause()
        finally:
            ended.set()

    call = PausableCall(function, "abandoned", CPU)
    for _ in range(num_rounds):
        call.go_on()
    call.abandon()
    call.abandon()
    assert ended.is_set() is (num_rounds > 0)
    assert not [one for one in threading.enumerate() if one.name == "abandoned"]


def test_who_is_interrupted_ends_the_call_first() -> None:
    """Else whatever is around the pass would be left while the pass goes on."""
    began, interrupted, ended = threading.Event(), threading.Event(), threading.Event()

    class Interrupting(queue.SimpleQueue):  # type: ignore[type-arg]
        """The wait that somebody at the keyboard ends."""

        def get(self, *_: object) -> None:
            assert began.wait(10)
            interrupted.set()
            raise KeyboardInterrupt

    def function() -> None:
        began.set()
        call = running_call()
        assert call is not None and interrupted.wait(10)
        try:
            call.pause()
        finally:
            ended.set()

    call = PausableCall(function, "interrupted", CPU)
    call._has_stopped = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        call.go_on()
    ends = ended.is_set()
    call.abandon()
    assert ends


def test_only_the_last_backward_pass_of_a_unit_is_synchronized() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def unsynchronized() -> Iterator[None]:
        entered.append("no sync")
        yield

    passes = EnginePasses(None, hooks_tensors=False, unsynchronized=unsynchronized)
    with passes.backward(0, 0, is_last=False):
        assert entered == ["no sync"]
    with passes.backward(0, 1, is_last=True):
        assert entered == ["no sync"]


@pytest.mark.parametrize("num_units", [1, 2, 3])
def test_each_step_says_once_that_the_optimizer_s_step_is_near(num_units: int) -> None:
    """As soon as its backward has come to the first unit."""
    told: list[str] = []
    passes = megatron_layer_major._Passes(None, SimpleNamespace(), lambda: told.append("near"))
    for step in range(1, 4):
        passes.clear()
        for unit in reversed(range(num_units)):
            for micro_batch in range(2):
                assert len(told) == step - 1 or (unit, micro_batch) == (0, 1)
                with passes.backward(unit, micro_batch, is_last=micro_batch == 1):
                    pass
        assert len(told) == step


def test_what_megatron_adds_elsewhere_is_taken_from_there() -> None:
    passes = megatron_layer_major._Passes(None, SimpleNamespace(), lambda: None)
    weight: Any = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weight.main_grad = before = torch.ones(2)
    with passes.elsewhere(weight) as came:
        weight.main_grad += 2.0
        gradient = came()
    assert gradient is not None and gradient.dtype is torch.bfloat16
    assert gradient.tolist() == [2.0, 2.0]
    assert weight.main_grad is before and before.tolist() == [1.0, 1.0]


def test_a_weight_of_two_units_and_fused_gradients_are_refused() -> None:
    """The kernel adds in fp32 what autograd adds in bf16, and in another order."""
    settings = SimpleNamespace(gradient_accumulation_fusion=True)
    passes = megatron_layer_major._Passes(None, settings, lambda: None)
    weight: Any = torch.nn.Parameter(torch.ones(2))
    with passes.elsewhere(weight) as came:
        assert came() is None
    weight.main_grad = torch.zeros(2)
    with (
        pytest.raises(ConfigurationError, match="pass --no-gradient-accumulation-fusion"),
        passes.elsewhere(weight),
    ):
        pass


def test_gradients_are_complete_where_the_last_micro_batch_has_none() -> None:
    """Then it is another one whose backward pass through the unit is the last."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    schedule = LayerMajorSchedule(units_of(list(layers), 2), CPU, TorchGenerators(CPU))
    ran: list[tuple[int, int, bool]] = []

    class Passes(EnginePasses):
        @contextlib.contextmanager
        def backward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
            ran.append((unit, micro_batch, is_last))
            yield

    def forward(is_cut: bool) -> torch.Tensor:
        hidden = layers[0](*schedule.enter_layer(layers[0], (torch.ones(2),)))
        hidden = hidden.detach() if is_cut else hidden
        return layers[1](*schedule.enter_layer(layers[1], (hidden,))).sum()

    forwards = [functools.partial(forward, is_cut) for is_cut in (False, False, True)]
    schedule.run(forwards, torch.Tensor.backward, Passes(None, hooks_tensors=False))
    assert ran == [(1, 0, False), (1, 1, False), (1, 2, True), (0, 0, False), (0, 1, True)]


def test_what_a_unit_has_saved_is_handed_over_when_it_pauses(engine: OffloadEngine) -> None:
    weight = torch.ones(8, requires_grad=True)
    passes = EnginePasses(engine, hooks_tensors=True)
    with engine.step(), passes.forward(0, 0, is_last=True), passes.whole_forward() as before_pause:
        product = weight * (weight + 1)
        settle(engine)
        assert not ssd(engine).used_bytes
        before_pause()
        settle(engine)
        assert ssd(engine).used_bytes
        del product


def test_what_holds_in_the_caller_s_thread_holds_in_the_call() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(3)

    def function() -> tuple[bool, torch.dtype, int]:
        is_on = torch.is_autocast_enabled("cpu")
        return is_on, torch.get_autocast_dtype("cpu"), variable.get()

    with torch.autocast("cpu", torch.float16):
        call = PausableCall(function, "call", CPU)
    call.go_on()
    assert call.take_result() == (True, torch.float16, 3)


def test_modes_of_torch_s_functions_hold_in_the_call() -> None:
    """As the one in which CUDA means the CPU, and the default device."""

    class Renamed(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return 5 if func is torch.Tensor.cuda else func(*args, **(kwargs or {}))

    def function() -> tuple[Any, torch.device]:
        return torch.ones(1).cuda(), torch.empty(1).device

    with Renamed(), torch.device("meta"):
        call: PausableCall[Any] = PausableCall(function, "call", CPU)
    call.go_on()
    assert call.take_result() == (5, torch.device("meta"))


def test_modes_of_dispatch_hold_in_the_call() -> None:
    """Without a word to the mode, which knows of one entry."""

    class Counting(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.names.append(f"{func} in {threading.current_thread().name}")
            return func(*args, **(kwargs or {}))

    def function() -> None:
        torch.ones(1)

    with Counting() as mode:
        call = PausableCall(function, "call", CPU)
        call.go_on()
        assert mode.names == ["aten.ones.default in call"]
        torch.zeros(1)
    torch.zeros(1)
    assert len(mode.names) == 2


def test_hooks_of_saved_tensors_hold_in_the_call_below_its_own() -> None:
    weight = torch.ones(2, requires_grad=True)

    def packed_by(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (packed.append(name), tensor)[1], lambda tensor: tensor
        )

    def function() -> torch.Tensor:
        product = weight * weight.detach()
        call = running_call()
        assert call is not None
        with packed_by("the call's"):
            call.pause()
            product = product * weight.detach()
        return product * weight.detach()

    packed: list[str] = []
    with packed_by("outer"), packed_by("the caller's"):
        call = PausableCall(function, "call", CPU)
    call.go_on()
    weight * weight.detach()  # here nobody packs
    call.go_on()
    assert packed == ["the caller's", "the call's", "the caller's"]
    call.take_result().sum().backward()
    assert weight.grad is not None


def test_autocast_s_settings_hold_in_the_call() -> None:
    """Also without a context: what the next one is entered with, and whether it is an inner one."""

    def settings() -> tuple[Any, ...]:
        dtype = torch.get_autocast_dtype("cpu")
        return (
            autocast_depth() > 0,
            dtype,
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    def in_a_call() -> tuple[Any, ...]:
        call = PausableCall(settings, "call", CPU)
        call.go_on()
        return call.take_result()

    assert in_a_call() == settings()
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert in_a_call() == settings() == (True, torch.float16, True, False)
        with torch.autocast("cpu", enabled=False):
            assert in_a_call() == settings()
    dtype = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert in_a_call() == settings() == (False, torch.float16, False, True)
    finally:
        torch.set_autocast_dtype("cpu", dtype)


def test_each_thread_s_casts_of_a_weight_are_its_own() -> None:
    """Autocast's cache is one for all; here autocast is around calls and what is between them."""
    linear = torch.nn.Linear(2, 2, bias=False)

    def cast() -> Any:
        """The node that has cast the weight, twice the same."""
        once, again = (linear(torch.ones(1, 2)).grad_fn for _ in range(2))
        casts = [one.next_functions[-1][0].next_functions[0][0] for one in (once, again)]
        assert casts[0] is casts[1] and casts[0].name() == "ToCopyBackward0"
        return casts[0]

    def function() -> tuple[Any, Any]:
        call = running_call()
        assert call is not None
        before = cast()
        call.pause()
        return before, cast()

    with torch.autocast("cpu", torch.bfloat16):
        calls = [PausableCall(function, "call", CPU) for _ in range(2)]
        found = [cast()]
        for call in calls:
            call.go_on()
            found.append(cast())
        for call in calls:
            call.go_on()
            found += [*call.take_result(), cast()]
    assert len({id(one) for one in found}) == len(found) == 9


@pytest.mark.parametrize("before", [0, 5, 623, 624])
@pytest.mark.parametrize("number", [0, 1, 7, 623, 624, 625, 5000])
def test_random_numbers_of_a_cpu_are_counted(before: int, number: int) -> None:
    generator = torch.Generator().manual_seed(11)
    for _ in range(before):
        torch.empty(1, dtype=torch.int32).random_(generator=generator)
    begin = generator.get_state()
    torch.empty(number, dtype=torch.int32).random_(generator=generator)
    end = generator.get_state()
    assert num_drawn(begin, end) == number
    assert torch.equal(advanced(begin, number), end)


def test_numbers_of_all_kinds_of_operations_are_counted() -> None:
    generator = torch.Generator().manual_seed(11)
    begin = generator.get_state()
    torch.empty(33).uniform_(generator=generator)
    torch.empty(100).bernoulli_(0.1, generator=generator)
    torch.randint(9, (3, 3), generator=generator)
    end = generator.get_state()
    found = num_drawn(begin, end)
    assert found is not None and torch.equal(advanced(begin, found), end)


@pytest.mark.parametrize("before", [0, 1, 623])
@pytest.mark.parametrize("more", [-625, -624, -1, 0, 1, 623, 624, 625])
@pytest.mark.parametrize("chunks", [1, 3])
def test_many_random_numbers_are_drawn_in_a_little_memory(
    before: int, more: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = chunks * random_numbers._DRAWN_AT_ONCE + more
    generator = torch.Generator().manual_seed(11)
    torch.empty(before, dtype=torch.int32).random_(generator=generator)
    begin = generator.get_state()
    torch.empty(number).uniform_(generator=generator)
    sizes: list[int] = []

    def empty(size: int, **settings: Any) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, **settings)

    monkeypatch.setattr(torch, "empty", empty)
    assert torch.equal(advanced(begin, number), generator.get_state())
    assert sizes == [min(number, random_numbers._DRAWN_AT_ONCE)]


@pytest.mark.parametrize("numbers", [[16], [17], [624], [1000], [4, 6], [3, 5], [1, 1]])
def test_normal_numbers_are_counted_where_none_is_left_over(numbers: list[int]) -> None:
    """Below 16 they are drawn in pairs; the next draw takes the second one of the last pair."""
    generator = torch.Generator().manual_seed(11)
    begin = generator.get_state()
    for number in numbers:
        torch.empty(number).normal_(generator=generator)
    end = generator.get_state()
    found = num_drawn(begin, end)
    assert found is not None and torch.equal(advanced(begin, found), end)


def test_a_normal_number_that_is_left_over_is_not_counted() -> None:
    """The next micro-batch would begin with another one."""
    generator = torch.Generator().manual_seed(11)
    begin = generator.get_state()
    torch.empty(3).normal_(generator=generator)
    left_over = generator.get_state()
    assert num_drawn(begin, left_over) is None
    torch.empty(40).uniform_(generator=generator)  # leaves it where it is
    assert num_drawn(left_over, generator.get_state()) == 40
    torch.empty(1).normal_(generator=generator)
    assert num_drawn(left_over, generator.get_state()) is None


def test_numbers_are_counted_whatever_device_new_tensors_are_made_on() -> None:
    begin = torch.Generator().manual_seed(11).get_state()
    with torch.device("meta"):
        end = advanced(begin, 700)
        assert num_drawn(begin, end) == 700
    assert torch.equal(advanced(begin, 700), end)


def test_another_seed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.offload.layer_major.random_numbers._MOST_BLOCKS", 3)
    begin = torch.Generator().manual_seed(1).get_state()
    assert num_drawn(begin, torch.Generator().manual_seed(2).get_state()) is None


def test_generators_of_another_kind_are_not_counted() -> None:
    one, other = torch.zeros(40, dtype=torch.uint8), torch.ones(40, dtype=torch.uint8)
    assert num_drawn(one, one) == 0 and num_drawn(one, other) is None


def test_a_model_in_chunks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a model in one chunk"):
        only_chunk([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])


def test_generators_that_cannot_be_put_aside_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = SimpleNamespace(get_states=lambda: {"default": torch.Generator()})
    monkeypatch.setattr(megatron_layer_major, "_tracker", lambda: tracker)
    with pytest.raises(ConfigurationError, match="drop --te-rng-tracker"):
        megatron_layer_major._Generators(CPU).states()


def test_offsets_of_a_counter_are_counted() -> None:
    def state(seed: int, offset: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("=QQ", seed, offset)), dtype=torch.uint8)

    assert num_drawn(state(3, 8), state(3, 20)) == 12
    assert torch.equal(advanced(state(3, 8), 12), state(3, 20))
    assert num_drawn(state(3, 8), state(4, 20)) is None


class NotedBoundary:
    """Keeps everything, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def put(self, tensor: torch.Tensor, scope: Scope) -> Any:
        self.asked.append(f"put {scope.micro_batch}")
        return (tensor, scope)

    def take(self, waiting: Any) -> torch.Tensor:
        return waiting[0]  # type: ignore[no-any-return]

    def empty(self, tensor: torch.Tensor, scope: Scope) -> Any:
        self.asked.append(f"empty {scope.micro_batch}")
        return (tensor, scope)

    def fill(self, waiting: Any) -> Any:
        self.asked.append(f"fill {waiting[1].micro_batch}")

    def is_empty(self, tensor: torch.Tensor) -> bool:
        return False

    def read_ahead(self, waiting: Any) -> None:
        self.asked.append(f"ahead {waiting[1].micro_batch}")


def noted_step(num_batches: int, *, alternates: bool = False) -> list[str]:
    """Of a step of two units: what its boundary is asked for until the second unit begins."""
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    boundary = NotedBoundary()

    class Noted(EnginePasses):
        @property
        def boundary(self) -> Any:
            return boundary

    passes = Noted(None, hooks_tensors=True)
    units = {layer: n for n, layer in enumerate(layers)}
    schedule = LayerMajorSchedule(units, CPU, TorchGenerators(CPU), alternates=alternates)

    def forward() -> torch.Tensor:
        x = torch.ones(4)
        mask = torch.ones(4)
        for layer in layers:
            entered, _ = schedule.enter_layer(layer, (x, mask))
            x = layer(entered)
        return x.sum()

    for _ in range(2):
        boundary.asked.clear()
        schedule.run([forward] * num_batches, torch.Tensor.backward, passes)
    return boundary.asked


def test_what_waits_is_read_while_the_micro_batches_before_compute() -> None:
    forward = [one for one in noted_step(4) if not one.startswith("put")]
    first = forward.index("fill 0")
    assert forward[: first + 2] == [
        "empty 0",
        "empty 1",
        "ahead 0",
        "empty 2",
        "ahead 0",
        "ahead 1",
        "empty 3",
        "ahead 1",
        "ahead 2",
        "fill 0",
        "ahead 2",
    ]


def test_whose_turns_are_next_stay_between_units() -> None:
    assert not [one for one in noted_step(2) if one.startswith(("empty", "put"))]
    left = [one for one in noted_step(4, alternates=True) if one.startswith("empty")]
    assert left == ["empty 0", "empty 1", "empty 2"]  # the next unit begins with the last one


def test_what_has_no_graph_does_not_leave_between_units() -> None:
    """Masks and tables, which micro-batches may share: one tensor of two leaves."""
    asked = noted_step(3)
    assert asked.count("empty 0") == asked.count("empty 1") == asked.count("empty 2") == 1
