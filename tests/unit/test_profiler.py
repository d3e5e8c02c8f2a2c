# SPDX-License-Identifier: Apache-2.0
"""What the profiler makes of a step, on a clock that only the model's operations move."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, Placement, Scope
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.planner.profile.build import passes_s, profile_of, tier_profiles
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.stage_profile import StageProfile, TierProfile
from megatron.offload.planner.profile.timings import LayerTimings
from megatron.offload.tiers.host import HostTier

MIN_BYTES = 1000
SSD = TierProfile("ssd", 1e9, 2e9)


class Clock(CpuDevice):
    """A device whose time is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def timestamp(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        """The engine makes compute wait."""
        self.now_s += seconds
        self.waits_s.append(seconds)


class Takes(torch.autograd.Function):
    """An operation that takes some seconds forward and backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, clock: Clock, seconds: float, backward_s: float, wait_s: float
    ) -> torch.Tensor:
        clock.now_s += seconds
        ctx.then = clock, backward_s, wait_s
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        clock, backward_s, wait_s = ctx.then
        clock.now_s += backward_s
        clock.wait(wait_s)
        return gradient, None, None, None, None


class Run:
    """Micro-batches through an embedding, two layers and a loss."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.profiler = Profiler(self.clock, MIN_BYTES, lambda: len(self.clock.waits_s))
        self.layers = ["decoder.1", "decoder.2"]
        self.divided = True
        self.recomputed: set[str] = set()
        self.has_parts = False
        self.recomputed_parts: set[tuple[str, str]] = set()
        self.selective: list[int] = []  # sizes, of each MLP; below 0 of what is kept for it
        self.head_bytes = 0  # that the loss saves
        self.head_replays: torch.UntypedStorage | None = None  # as well
        self.spared: dict[int, int] = {}  # the same by storage
        self.replays: list[torch.UntypedStorage] = []  # of each MLP, computed again in 0.5 s each
        self.only_for_replay = 0  # bytes of each MLP
        self.unreplayed: set[str] = set()  # layers whose MLPs keep that
        self.encoded = (
            0  # bytes of each MLP, of which a codec makes half as many in 0.5 s, and back
        )
        self.unencoded: set[str] = set()  # layers whose MLPs have them as they are

    def step(self, num: int = 2, tokens: int = 8, *, well: bool = True) -> None:
        self.profiler.begin_step()
        for micro_batch in range(num):
            with self.profiler.forward(0, micro_batch):
                x = torch.zeros(tokens, 2, 4, requires_grad=True)
                x = self.takes(x, 0.5, 0.25)
                for name in self.layers:
                    x = self.layer(name, x)
                x = self.takes(x, 0.125, 4.0)
                if self.head_bytes:
                    self.profiler.moves(Scope(), self.head_bytes)
                if self.head_replays is not None and "decoder.2.after" in self.unreplayed:
                    self.profiler.stayed(Scope(), self.head_replays)
                elif self.head_replays is not None:
                    self.profiler.replays(Scope(), self.head_replays, 0, 0)
            with self.profiler.backward(0, micro_batch):
                x.sum().backward()
            self.clock.now_s += 100.0  # between passes
        self.profiler.end_step(well=well)

    def takes(self, x: torch.Tensor, *seconds: float, wait_s: float = 0.0) -> torch.Tensor:
        result = Takes.apply(x, self.clock, *seconds, wait_s)
        assert isinstance(result, torch.Tensor)
        return result

    def layer(self, name: str, x: torch.Tensor) -> torch.Tensor:
        recomputes = name in self.recomputed
        scope = Scope(0, 0, name)
        timings = self.profiler.begin_layer(scope, [x], recomputes=recomputes)
        assert timings is not None
        timings.has_parts = self.has_parts
        if not recomputes:
            if self.selective and (name, "mlp-selective") not in self.recomputed_parts:
                now = self.profiler.now()
                span = now, now._replace(timestamp=now.timestamp + 0.5)
                spared = self.spared or {n: s for n, s in enumerate(self.selective) if s > 0}
                more = [-size for size in self.selective if size < 0]
                self.profiler.selective(timings, "mlp", span, spared, more, extra_bytes=77)
            y = self._parts(scope, x, 3.0)
            for part in ("mlp", "mlp-selective"):
                self._again(scope, timings, part, y)
            return y
        profiler, clock = self.profiler, self.clock

        def again(_: torch.Tensor) -> None:
            with profiler.recomputation(timings):
                clock.now_s += 1.5

        y = self.takes(x, 2.0, 5.0)
        profiler.end_layer([y])
        y.register_hook(again)
        return y

    def _parts(self, scope: Scope, x: torch.Tensor, seconds: float) -> torch.Tensor:
        size = x.shape[0] * 1000
        x = self.takes(x, 1.0, 2.0, wait_s=50.0)
        if self.divided:
            attention = dataclasses.replace(scope, part="attention")
            self.profiler.moves(attention, self._saved(scope, "attention", size))
            self.clock.wait(30.0)
            self.profiler.reach_middle(x)
            self._again(scope, self.profiler._layer, "attention", x)
        x = self.takes(x, seconds, 5.0)
        mlp = dataclasses.replace(scope, part="mlp" if self.divided else "")
        size = self._saved(scope, "mlp", size)
        large, small = torch.UntypedStorage(size), torch.UntypedStorage(MIN_BYTES - 1)
        self.profiler.stayed(mlp, large)
        self.profiler.stayed(mlp, large)  # saved twice
        self.profiler.stayed(mlp, small)
        self.alive = large, small
        if scope.layer in self.unreplayed:
            for one in self.replays:
                self.profiler.stayed(mlp, one)
        elif self.replays:
            if self.only_for_replay:
                self.profiler.saves_for_replay(mlp, self.only_for_replay)
                self.profiler.moves(mlp, self.only_for_replay)
            for one in self.replays:
                self.profiler.replays(mlp, one, 100, 0)
            x.register_hook(lambda _: self._replay(mlp))
            x = self.takes(x, 0.0, 0.0)
        if self.encoded and scope.layer in self.unencoded:
            self.profiler.moves(mlp, self.encoded)
        elif self.encoded:
            with self.profiler.encoding(mlp):
                self.clock.now_s += 0.5
                self.clock.wait(10.0)
                self.profiler.saves_for_replay(mlp, self.encoded // 2)
                self.profiler.moves(mlp, self.encoded // 2)
            encoded = torch.UntypedStorage(self.encoded)
            self.profiler.replays(mlp, encoded, 0, self.encoded // 2)
            x.register_hook(lambda _: self._decode(mlp))
            x = self.takes(x, 0.0, 0.0)
        self.profiler.end_layer([x])
        return x

    def _replay(self, scope: Scope) -> None:
        """As backward comes to it."""
        for _ in self.replays:
            with self.profiler.replaying(scope, decodes=False):
                self.clock.now_s += 0.5
                self.clock.wait(10.0)  # which counts as a wait

    def _decode(self, scope: Scope) -> None:
        with self.profiler.replaying(scope, decodes=True):
            self.clock.now_s += 0.25

    def _saved(self, scope: Scope, part: str, size: int) -> int:
        """A part that is recomputed saves less."""
        return size // 4 if (scope.layer, part) in self.recomputed_parts else size

    def _again(
        self, scope: Scope, timings: LayerTimings | None, part: str, output: torch.Tensor
    ) -> None:
        """A part that is recomputed runs again when the gradient of its output comes."""
        if (scope.layer, part) not in self.recomputed_parts:
            return
        assert timings is not None

        def again(_: torch.Tensor) -> None:
            with self.profiler.recomputation(timings, part):
                self.clock.now_s += 0.75

        output.register_hook(again)

    def profile(self, **changes: Any) -> StageProfile:
        asked: dict[str, Any] = {
            "seconds_between": self.clock.seconds_between,
            "waits_s": self.clock.waits_s,
            "encodings": self.profiler.encodings,
            "step_fixed_s": 9.0,
            "recomputes": True,
            "sizes": dict(self.profiler.sizes),
        }
        return profile_of(
            self.profiler.steps, PipelinePosition(1, 0, 1, 1), [SSD], **{**asked, **changes}
        )


def test_each_part_of_a_step_gets_its_seconds_without_waits() -> None:
    run = Run()
    run.step()
    profile = run.profile()
    assert [layer.name for layer in profile.layers] == ["decoder.1", "decoder.2"]
    for layer in profile.layers:
        assert (layer.forward_s, layer.backward_s, layer.recompute_s) == (4.0, 7.0, 4.0)
        attention, mlp = layer.parts
        assert (attention.name, attention.produced_s, attention.first_use_s) == (
            "attention", 1.0, 5.0,
        )  # fmt: skip
        assert (mlp.name, mlp.produced_s, mlp.first_use_s) == ("mlp", 4.0, 0.0)
    assert (profile.before_s, profile.after_s) == ((0.5,), (0.125,))
    assert (profile.backward_before_s, profile.backward_after_s) == ((4.0,), (0.25,))
    assert profile.step_fixed_s == 9.0 and profile.num_micro_batches == 2


class Graphs(Run):
    """The same layers in a compiled graph: what it saves and uses is all that is seen of them."""

    def __init__(self, *saves: tuple[float, str], uses: list[tuple[float, str]]) -> None:
        super().__init__()
        self.saves, self.uses = saves, uses

    def step(self, num: int = 2, tokens: int = 8, *, well: bool = True) -> None:
        self.profiler.begin_step()
        with self.profiler.forward(0, 0):
            for seconds, name in self.saves:
                self.clock.now_s += seconds
                scope = Scope(0, 0, name)
                self.profiler.reach_layer(scope, is_layer=not name.endswith(".after"))
                self.profiler.moves(scope, 1000)
            self.clock.now_s += 0.25
        self.clock.now_s += 100.0
        with self.profiler.backward(0, 0):
            for seconds, name in self.uses:
                self.clock.now_s += seconds
                self.profiler.reach_backward(Scope(0, 0, name))
                self.clock.wait(50.0)
            self.clock.now_s += 0.5
        self.profiler.end_step(well=well)


def test_layers_of_a_compiled_graph_are_seen_by_what_it_saves() -> None:
    first, second, head = "decoder.1", "decoder.2", "decoder.2.after"
    run = Graphs(
        (0.5, first), (1.0, first), (2.0, second), (0.0, first), (3.0, second), (4.0, head),
        uses=[
            (0.125, head), (1.0, second), (0.25, first), (0.75, second), (2.0, first), (3.0, first),
        ],
    )  # fmt: skip
    run.step()
    profile = run.profile()
    assert [one.name for one in profile.layers] == [first, second, head]
    assert [one.parts[0].movable_bytes for one in profile.layers] == [3000, 2000, 1000]
    assert [one.forward_s for one in profile.layers] == [3.0, 7.0, 0.25]
    # What others use of the first layer comes back before its backward begins.
    assert [one.backward_s for one in profile.layers] == [5.5, 1.0, 1.125]
    assert not any(one.recompute_s for one in profile.layers)


def test_two_passes_may_have_one_backward() -> None:
    """As those of a pair of answers, whose losses are added."""
    run = Graphs(uses=[])
    profiler, clock = run.profiler, run.clock
    profiler.begin_step()
    for number in range(2):
        with profiler.forward(0, number):
            profiler.reach_layer(Scope(0, number, "a"), is_layer=True)
            clock.now_s += 1.0
    with profiler.backward(0, 0), profiler.backward(0, 1):
        for number in (1, 0):
            clock.now_s += 2.0
            profiler.reach_backward(Scope(0, number, "a"))
    profiler.end_step(well=True)
    began = [one.layers[0].backward_began for one in profiler.steps[0]]
    assert [one and one.timestamp for one in began] == [6.0, 4.0]


def test_what_a_graph_saves_last_of_a_layer_ends_it() -> None:
    """Also where it saves something else before."""
    run = Graphs((0.5, "a"), (1.0, "a.after"), (2.0, "a"), uses=[(1.0, "a.after"), (1.0, "a")])
    run.step()
    (layer, behind) = run.profile().layers
    assert (layer.name, layer.forward_s, layer.backward_s) == ("a", 3.25, 0.5)
    assert (behind.name, behind.forward_s) == ("a.after", 0.0)


@pytest.mark.parametrize("left_out", [["decoder.2"], ["decoder.1"], []])
def test_passes_that_leave_layers_out_count_for_none(left_out: list[str]) -> None:
    """LayerDrop, which some models of speech and translation have by default."""
    run, whole = Run(), Run()
    every = run.layers
    for layers in (left_out, every, left_out):
        run.layers = layers
        run.step()
    whole.step()
    assert run.profile().layers == whole.profile().layers


def test_bytes_are_told_by_what_could_move() -> None:
    run = Run()
    run.step()
    attention, mlp = run.profile().layers[0].parts
    assert (attention.movable_bytes, attention.resident_bytes, attention.num_storages) == (
        8000,
        0,
        1,
    )
    assert (mlp.movable_bytes, mlp.resident_bytes, mlp.num_storages) == (8000, MIN_BYTES - 1, 1)
    assert run.profile().layers[0].input_bytes == 8 * 2 * 4 * 4
    assert run.profile().sizes == {"sequence_length": 8, "micro_batch_size": 2}


def test_what_is_saved_after_the_layers_can_be_planned_too() -> None:
    run = Run()
    run.head_bytes = 5000
    run.step()
    profile = run.profile()
    assert [one.name for one in profile.layers] == ["decoder.1", "decoder.2", "decoder.2.after"]
    head = profile.layers[-1]
    assert (head.forward_s, head.backward_s, head.recompute_s) == (0.125, 4.0, None)
    assert [(part.name, part.movable_bytes) for part in head.parts] == [("layer", 5000)]
    assert (profile.before_s, profile.backward_after_s) == ((0.5,), (0.25,))
    assert (profile.after_s, profile.backward_before_s) == ((0.0,), (0.0,)), "it has them"


def test_a_layer_that_is_not_divided_is_one_group() -> None:
    run = Run()
    run.divided = False
    run.step()
    (part,) = run.profile().layers[0].parts
    assert (part.name, part.produced_s, part.first_use_s) == ("layer", 4.0, 0.0)


def test_passes_are_counted_with_their_waits_and_without_what_lies_between() -> None:
    run = Run()
    run.step(num=3)
    # Per layer 1 + 3 forward, 2 + 5 backward, 30 and 50 waiting.
    each_s = 0.5 + 0.125 + 0.25 + 4.0 + 2 * (4.0 + 7.0 + 30.0 + 50.0)
    assert passes_s(run.profiler.steps, run.clock.seconds_between) == 3 * each_s


def test_recomputation_is_told_apart_from_backward_and_keeps_what_was_known() -> None:
    run = Run()
    run.step()
    before = run.profile()
    run.profiler.clear()
    run.recomputed = {"decoder.2"}
    run.step()
    first, second = run.profile(previous=before).layers
    assert first == before.layers[0]
    assert (second.forward_s, second.backward_s, second.recompute_s) == (2.0, 5.0, 1.5)
    assert second.parts == before.layers[1].parts


def test_a_part_is_taken_to_run_again_in_its_forward_seconds() -> None:
    run = Run()
    run.has_parts = True
    run.step()
    for layer in run.profile().layers:
        attention, mlp = layer.parts
        assert (attention.recompute_s, mlp.recompute_s) == (1.0, 3.0)
        assert attention.input_bytes == mlp.input_bytes == 8 * 2 * 4 * 4
    run.divided = False
    run.profiler.clear()
    run.step()
    assert [layer.parts[0].recompute_s for layer in run.profile().layers] == [None, None]


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_a_part_that_ran_again_is_told_apart_from_backward_and_keeps_what_was_known(
    part: str,
) -> None:
    run = Run()
    run.has_parts = True
    run.step()
    before = run.profile()
    run.profiler.clear()
    run.recomputed_parts = {("decoder.2", part)}
    run.step()
    first, second = run.profile(previous=before).layers
    assert first == before.layers[0]
    expected = tuple(
        dataclasses.replace(one, recompute_s=0.75) if one.name == part else one
        for one in before.layers[1].parts
    )
    assert second == dataclasses.replace(before.layers[1], parts=expected)


def test_selective_operations_are_what_they_save_and_take() -> None:
    run = Run()
    run.has_parts, run.selective = True, [3000, MIN_BYTES - 1, -2000]
    run.step()
    before = run.profile()
    for layer in before.layers:
        attention, mlp = layer.parts
        assert (attention.selective_bytes, attention.selective_s) == (0, 0.0)
        assert (mlp.selective_bytes, mlp.selective_s, mlp.movable_bytes) == (1000, 0.5, 8000)
        assert (attention.selective_extra_bytes, mlp.selective_extra_bytes) == (0, 77)
    run.profiler.clear()
    run.recomputed_parts = {("decoder.2", "mlp-selective")}
    run.step()
    first, second = run.profile(previous=before).layers
    mlp = dataclasses.replace(before.layers[1].parts[1], selective_s=0.75)
    assert first == before.layers[0]
    assert second == dataclasses.replace(before.layers[1], parts=(second.parts[0], mlp))
    assert second.parts[0] == before.layers[1].parts[0]


def test_inputs_that_a_tier_can_take_are_told_from_those_that_stay() -> None:
    run = Run()
    run.has_parts = True
    run.step(tokens=100)  # an input of 100 x 2 x 4 numbers
    for layer in run.profile().layers:
        assert layer.movable_input_bytes == layer.input_bytes == 3200
        assert [one.movable_input_bytes for one in layer.parts] == [3200, 3200]
    for layer in run.profile(moves_inputs=False).layers:
        assert layer.movable_input_bytes == 0 and layer.input_bytes == 3200
        assert [one.movable_input_bytes for one in layer.parts] == [0, 0]
    run.profiler.clear()
    run.step(tokens=8)  # too small
    assert [layer.movable_input_bytes for layer in run.profile().layers] == [0, 0]


def test_an_input_that_the_schedule_holds_stays() -> None:
    run = Run()
    run.profiler.begin_step()
    with run.profiler.forward(0, 0):
        leaf = torch.zeros(100, 2, 4, requires_grad=True)
        timings = run.profiler.begin_layer(Scope(0, 0, "decoder.1"), [leaf], recomputes=False)
        assert timings is not None
        assert (timings.input_bytes, timings.movable_input_bytes) == (3200, 0)
    run.profiler.end_step(well=False)


def test_layers_that_must_not_be_recomputed_are_not_offered() -> None:
    run = Run()
    run.has_parts = True
    run.step()
    layers = run.profile(recomputes=False).layers
    assert [layer.recompute_s for layer in layers] == [None, None]
    assert [part.recompute_s for layer in layers for part in layer.parts] == [None] * 4


@pytest.mark.parametrize(("number", "num_disturbed"), [(3, 1), (2, 1), (4, 2)])
def test_a_disturbed_micro_batch_does_not_count(number: int, num_disturbed: int) -> None:
    run = Run()
    run.step(num=number)
    for one in run.profiler.steps[0][:num_disturbed]:
        layer = one.layers[0]
        assert layer.ended is not None
        layer.ended = layer.ended._replace(timestamp=layer.ended.timestamp + 1000)
    assert run.profile().layers[0].forward_s == 4.0


def test_a_step_that_ended_badly_does_not_count() -> None:
    run = Run()
    run.step(well=False)
    assert run.profiler.steps == [] and not run.profiler.measures


def test_a_step_without_all_its_backward_passes_does_not_count() -> None:
    run = Run()
    run.profiler.begin_step()
    with run.profiler.forward(0, 0):
        run.layer("decoder.1", torch.zeros(8, 2, 4, requires_grad=True))
    run.profiler.end_step(well=True)
    assert run.profiler.steps == []


def test_outside_of_measured_steps_only_sizes_are_noted() -> None:
    run = Run()
    x = torch.zeros(8, 2, 4, requires_grad=True) * 1
    with run.profiler.forward(0, 0):
        assert run.profiler.begin_layer(Scope(), [x], recomputes=False) is None
        run.profiler.end_layer([x])
    assert x._backward_hooks is None
    assert run.profiler.sizes == {"sequence_length": 8, "micro_batch_size": 2}


def test_of_micro_batches_with_several_sizes_the_largest_counts() -> None:
    run = Run()
    for tokens in (8, 16, 12):
        run.step(tokens=tokens)
    profile = run.profile()
    assert profile.sizes == {"sequence_length": 16, "micro_batch_size": 2}
    assert profile.layers[0].parts[0].movable_bytes == 16_000


def test_a_profile_keeps_all_bits_in_its_file() -> None:
    run = Run()
    run.step()
    assert StageProfile.from_json(run.profile().to_json()) == run.profile()
    with pytest.raises(ConfigurationError):
        run.profile(step_fixed_s=float("nan"))


def test_tiers_are_as_fast_as_they_were_measured() -> None:
    tier = HostTier(1 << 20)
    unused = tier_profiles({Placement.HOST: tier})
    block, transfer = tier.begin_write(torch.UntypedStorage(4096)) or pytest.fail("refused")
    transfer.wait()
    (used,) = tier_profiles({Placement.HOST: tier})
    assert unused[0].write_bytes_per_s == 1.0 and unused[0].capacity_bytes == 1 << 20
    assert used.name == "host"
    assert used.write_bytes_per_s == tier.statistics.writes.bytes_per_s
    assert used.read_bytes_per_s == used.write_bytes_per_s  # nothing has been read
    del block
    tier.close()


def test_what_is_replayed_is_neither_kept_nor_part_of_backward() -> None:
    without, run = Run(), Run()
    without.step()
    run.replays = [torch.UntypedStorage(size) for size in (5000, 3000)]
    run.step()
    before = without.profile()
    found = run.profile()
    for layer, other in zip(found.layers, before.layers, strict=True):
        mlp = layer.parts[1]
        assert (mlp.replayed_bytes, mlp.replay_extra_bytes, mlp.replay_s) == (8000, 5000, 1.0)
        parts = (
            other.parts[0],
            dataclasses.replace(
                other.parts[1],
                resident_bytes=other.parts[1].resident_bytes + 200,  # copies of parameters
                replayed_bytes=8000,
                replay_extra_bytes=5000,
                exact_extra_bytes=5000,
                replay_s=1.0,
                only_for_replay_bytes=200,
            ),
        )
        assert layer == dataclasses.replace(other, parts=parts)


def test_selective_operations_spare_nothing_that_is_replayed() -> None:
    """Their sizes are told before it is known that a storage is replayed."""
    run = Run()
    run.has_parts = True
    run.replays = [torch.UntypedStorage(3000)]
    run.selective = [3000, 2000]
    run.spared = {run.replays[0]._cdata: 3000, 1: 2000}
    run.step()
    for layer in run.profile().layers:
        assert layer.parts[1].selective_bytes == 2000


def test_what_is_replayed_is_known_from_before_where_a_layer_was_recomputed() -> None:
    run = Run()
    run.replays = [torch.UntypedStorage(5000)]
    run.step()
    before = run.profile()
    run.profiler.clear()
    run.recomputed = {"decoder.2"}
    run.step(tokens=16)
    second = run.profile(previous=before).layers[1].parts[1]
    assert (second.replayed_bytes, second.replay_extra_bytes, second.replay_s) == (
        10000,
        10000,
        1.0,
    )


def kept_without_replay(tokens: int) -> tuple[StageProfile, StageProfile]:
    """A profile with replay, and one of steps in which the second layer's MLP kept all of it."""
    run = Run()
    run.replays = [torch.UntypedStorage(3000), torch.UntypedStorage(5000)]
    run.only_for_replay = 700
    run.step()
    before = run.profile()
    run.profiler.clear()
    run.unreplayed = {"decoder.2"}
    run.step(tokens=tokens)
    lines = [("decoder.2", "mlp"), ("decoder.1", "attention")]
    plan = Plan(tuple(PlannedPart(0, *one, Placement.KEEP, 0, replays=False) for one in lines))
    return before, run.profile(previous=before, plan=plan)


def test_what_a_codec_takes_in_forward_and_in_backward_is_told_apart_from_the_layer() -> None:
    run = Run()
    run.replays = [torch.UntypedStorage(3000)]
    run.step()
    exact = run.profile()
    run.profiler.clear()
    run.encoded = 6000
    run.step()
    found = run.profile()
    assert [layer.forward_s for layer in found.layers] == [one.forward_s for one in exact.layers]
    assert [layer.backward_s for layer in found.layers] == [one.backward_s for one in exact.layers]
    [_, mlp], [_, without] = found.layers[0].parts, exact.layers[0].parts
    assert (mlp.codec_s, mlp.replay_s) == (0.5 + 0.25, without.replay_s + 0.5 + 0.25)
    assert (mlp.codec_spared_bytes, mlp.only_for_replay_bytes) == (3000, 100 + 3000)
    assert (mlp.replay_extra_bytes, mlp.exact_extra_bytes) == (6000, 3000)
    assert mlp.movable_bytes == without.movable_bytes + 3000
    assert mlp.exact_bytes == without.movable_bytes + without.resident_bytes + 6000
    assert (mlp.produced_s, mlp.recompute_s) == (without.produced_s, without.recompute_s)


@pytest.mark.parametrize("tokens", [8, 16])
def test_what_a_codec_spares_is_known_from_before_where_a_plan_left_it_out(tokens: int) -> None:
    run = Run()
    run.replays, run.encoded = [torch.UntypedStorage(3000)], 6000
    run.step()
    before = run.profile()
    run.profiler.clear()
    run.unencoded = {"decoder.2"}
    run.step(tokens=tokens)
    plan = Plan((PlannedPart(0, "decoder.2", "mlp", Placement.HOST, 0, encodes=False),))
    after = run.profile(previous=before, plan=plan).layers[1].parts[1]
    known = before.layers[1].parts[1]
    if tokens == 8:
        assert after == known
    saved = after.movable_bytes + after.resident_bytes
    assert saved / (saved + after.codec_spared_bytes) == pytest.approx(
        (known.movable_bytes + known.resident_bytes) / known.exact_bytes, rel=1e-3
    )
    assert (after.codec_s, after.replay_s) == (known.codec_s, known.replay_s)


def test_what_a_codec_spares_is_known_from_before_where_selective_operations_ran_again() -> None:
    """All of the part is known from before then, and is not scaled as what was left as it is."""
    run = Run()
    run.has_parts, run.encoded, run.selective = True, 6000, [3000]
    run.step()
    before = run.profile()
    run.profiler.clear()
    run.recomputed_parts, run.unencoded = {("decoder.2", "mlp-selective")}, {"decoder.2"}
    run.step()
    lines = (
        PlannedPart(0, "decoder.2", "mlp", Placement.HOST, 0, encodes=False),
        PlannedPart(0, "decoder.2", "mlp-selective", Placement.RECOMPUTE, 0),
    )
    after = run.profile(previous=before, plan=Plan(lines)).layers[1].parts[1]
    known = before.layers[1].parts[1]
    assert after == dataclasses.replace(known, selective_s=0.75)


def test_what_is_replayed_is_known_from_before_where_it_was_kept() -> None:
    before, after = kept_without_replay(tokens=8)
    assert before.layers[1].parts[1].only_for_replay_bytes == 700 + 2 * 100
    assert after == before


def test_what_runs_between_layers_is_known_from_before_too() -> None:
    run = Run()
    run.head_bytes, run.head_replays = 4000, torch.UntypedStorage(2000)
    run.step()
    before = run.profile()
    assert before.layers[2].replayed_bytes == 2000
    run.profiler.clear()
    run.unreplayed = {"decoder.2.after"}
    run.step()
    line = PlannedPart(0, "decoder.2.after", "layer", Placement.KEEP, 0, replays=False)
    assert run.profile(previous=before, plan=Plan((line,))) == before
    # What the policy has not been told of is taken as it is.
    run.step()
    assert run.profile(previous=before).layers[2].replayed_bytes == 0


def test_what_was_kept_says_how_much_more_is_replayed_now() -> None:
    before, after = kept_without_replay(tokens=16)
    [_, first], [_, second] = before.layers[1].parts, after.layers[1].parts
    kept_bytes = 16000 + MIN_BYTES - 1 + 8000  # what can move grows with the tokens
    scale = kept_bytes / first.all_bytes
    assert abs(second.all_bytes - kept_bytes) <= 2  # all is rounded
    assert second.replayed_bytes == round(scale * 8000)
    assert second.movable_bytes == round(scale * first.movable_bytes)
    assert second.replay_s == 1.0  # forward has taken as long as before
