# SPDX-License-Identifier: Apache-2.0
"""A codec: losses stay the same bit for bit, and gradients do not depend on where bytes were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ChangedInPlaceError, ConfigurationError, offload_activations
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.activations.saved.available import AvailableTensors
from tests.support.loops import Net, net, noise

MIN_BYTES = 512
CODECS = ["int8", "int4"]
HOST = {"mode": "host", "host_budget": "1GiB"}


class Training:
    """Losses and gradients of some steps, and the counters of the last one."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        held: list[torch.Tensor] | None = None,
        model: Net | None = None,
        num_steps: int = 4,
        **settings: Any,
    ) -> None:
        model = (net() if model is None else model).to(dtype)
        if held is not None:  # the caller holds what layers gave to each other
            for one in model.modules():
                one.register_forward_hook(lambda _, __, out: held.append(out))
        self.losses: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.counted: dict[str, Any] = {}
        handle = None
        if settings:
            handle = offload_activations(model, directory, min_bytes=MIN_BYTES, **settings)
        for seed in range(num_steps):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = model(noise(seed).to(dtype)).square().mean()
            loss.backward()
            self.losses.append(loss.detach())
            self.gradients += [one.grad for one in model.parameters() if one.grad is not None]
            if handle is not None:
                self.counted = handle.statistics
        if handle is not None:
            handle.close()

    def differs_from(self, other: Training) -> float:
        """The relative difference of all gradients together."""
        ours, theirs = (
            torch.cat([one.flatten().double() for one in training.gradients])
            for training in (self, other)
        )
        return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("replay", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_losses_are_the_same_and_gradients_nearly(
    dtype: torch.dtype, replay: str, codec: str
) -> None:
    exact = Training(dtype=dtype)
    found = Training(dtype=dtype, codec=codec, replay=replay, **HOST)
    assert all(map(torch.equal, found.losses, exact.losses))
    most = 0.2 if codec == "int4" else 0.02 if dtype is torch.float32 else 0.03
    assert 0 < found.differs_from(exact) < most
    assert found.counted["encoded_bytes"] > 0
    assert (found.counted["replayed_bytes"] > 0) is (replay == "on")


@pytest.mark.parametrize("codec", CODECS)
def test_gradients_are_the_same_wherever_bytes_were(codec: str, tmp_path: Path) -> None:
    """In memory, in host memory, on a drive that is slow, on both; the same again and again."""
    expected = Training(codec=codec, **HOST)
    for settings in (
        HOST,
        {"mode": "keep"},
        {"mode": "ssd"},
        {"mode": "ssd", "write_bytes_per_s": "100KB/s"},  # most is needed before it is written
        {"mode": "tiered", "host_budget": "64KiB"},
    ):
        directory = tmp_path if settings["mode"] in ("ssd", "tiered") else None
        found = Training(directory, codec=codec, **settings)
        assert all(map(torch.equal, found.losses, expected.losses)), settings
        assert all(map(torch.equal, found.gradients, expected.gradients)), settings


@pytest.mark.parametrize("replay", ["on", "off"])
@pytest.mark.parametrize("mode", ["keep", "host", "ssd"])
def test_what_others_hold_is_decoded_all_the_same(mode: str, replay: str, tmp_path: Path) -> None:
    """They have the exact bytes, and backward gets them nowhere."""
    settings = {"mode": mode, "codec": "int8", "replay": replay}
    directory = tmp_path if mode == "ssd" else None
    held: list[torch.Tensor] = []
    found = Training(directory, held=held, **settings)
    expected = Training(directory, **settings)
    assert held and all(map(torch.equal, found.gradients, expected.gradients))


@pytest.mark.parametrize("codec", CODECS)
def test_a_quarter_of_the_bytes_moves_or_an_eighth(codec: str) -> None:
    without = Training(replay="off", **HOST)
    found = Training(codec=codec, replay="off", **HOST)
    encoded = found.counted["encoded_bytes"]
    spared = without.counted["offloaded_bytes"] - found.counted["offloaded_bytes"]
    # Of a value in four bytes one and an eighth of a bit are left; half of one, but of sums.
    bits = 32 * (1 - spared / encoded)
    if codec == "int8":
        assert bits == pytest.approx(8.125, rel=0.01)
    else:
        assert 4.125 < bits < 7
    assert encoded > 0.7 * without.counted["offloaded_bytes"]


@pytest.mark.parametrize("is_sum", [True, False])
def test_sums_keep_eight_bits(is_sum: bool) -> None:
    """Norms compute a variance of the residual stream, and noise in it adds to that."""

    class Cube(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return ((x + y if is_sum else y).view(64, -1) ** 3).sum()

    def gradient(codec: str) -> tuple[torch.Tensor, int]:
        model = Cube()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        with offload_activations(model, min_bytes=MIN_BYTES, codec=codec, **HOST) as handle:
            model(x).backward()
            encoded = handle.statistics["encoded_bytes"]
        assert model.linear.weight.grad is not None
        return model.linear.weight.grad, encoded

    (eight, encoded), (four, _) = gradient("int8"), gradient("int4")
    assert encoded == 4 * 32 * 64
    assert torch.equal(eight, four) is is_sum


def test_what_is_saved_behind_layers_stays_exact() -> None:
    """A loss takes the logarithm of a probability, or divides by it: rounded to zero it is NaN."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)
            )
            self.dense, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            scores = 4 * self.norm(torch.nn.functional.gelu(self.dense(x)))
            return -scores.softmax(-1).log().mean()

    def gradients(codec: str) -> tuple[torch.Tensor, torch.Tensor]:
        model = Head()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        with offload_activations(model, min_bytes=MIN_BYTES, codec=codec, **HOST):
            for _ in range(3):  # what is replayed is found
                model.zero_grad()
                model(x).backward()
        head, first = model.dense.bias.grad, model.layers[0][0].weight.grad
        assert head is not None and first is not None
        return head, first

    head, first = gradients("off")
    for codec in CODECS:
        found, of_first = gradients(codec)
        assert torch.equal(found, head)
        assert 0 < (of_first - first).norm() < 0.2 * first.norm()


@pytest.mark.parametrize("function", ["sqrt", "norm"])
def test_a_layers_roots_and_norms_stay_exact(function: str) -> None:
    """Their gradients divide by them, and beside a large one a small one would be zero."""

    class Root(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * torch.logspace(-3, 3, len(x))[:, None]
            if function == "sqrt":
                return torch.sqrt(x.square().sum(-1) + 1e-12)
            return torch.linalg.vector_norm(x, dim=-1)

    def gradient(codec: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 128), Root())
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
        with offload_activations(model, min_bytes=MIN_BYTES, codec=codec, **HOST):
            (model(x) * torch.logspace(3, -3, len(x))).sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    exact = gradient("off")
    assert (gradient("int8") - exact).norm() < 0.05 * exact.norm()


def test_replay_goes_on_beside_it() -> None:
    """What is computed again is as much as without the codec, from the first step."""
    without, found = Training(**HOST), Training(codec="int8", **HOST)
    assert found.counted["replayed_bytes"] == without.counted["replayed_bytes"] > 0
    first = Training(codec="int8", num_steps=1, **HOST)
    assert all(map(torch.equal, first.gradients, found.gradients))


def test_exact_bytes_are_held_for_the_first_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are compared with them; a new shape is compared at once, as behind a resume."""
    held: list[int] = []
    hold = AvailableTensors.hold

    def count(available: AvailableTensors, storage: torch.UntypedStorage) -> None:
        hold(available, storage)
        held.append(len(available._exact))

    monkeypatch.setattr(AvailableTensors, "hold", count)
    model, replayed = net(), []
    with offload_activations(model, min_bytes=MIN_BYTES, codec="int8", **HOST) as handle:
        for length in (16, 16, 16, 16, 24, 24, 24, 24):
            held.clear()
            x = torch.randn(2, length, model.first.in_features)
            model(x).square().mean().backward()
            replayed.append(handle.statistics["replayed_bytes"] / length)
            assert handle.engine is not None
            available = handle.engine.hooks.recipes.available
            assert not available._exact  # a forward pass has ended
            is_first = len(replayed) % 4 in (1, 2, 3)  # two comparisons, and one pass without
            assert (max(held) > 0) == is_first, len(replayed)
        available._exact.append(torch.zeros(8).untyped_storage())
        handle.engine.end_layers()  # as Megatron's layers end
        assert not available._exact
    assert len(set(replayed)) == 1


def test_a_comparison_without_exact_bytes_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take decoded bytes for those that were saved, and is made when they are there."""
    model, replayed = net(), []
    hold = AvailableTensors.hold
    with offload_activations(model, min_bytes=MIN_BYTES, codec="int8", **HOST) as handle:
        for step in range(4):
            forgets = step < 2
            monkeypatch.setattr(AvailableTensors, "hold", (lambda *_: None) if forgets else hold)
            model(noise(step)).square().mean().backward()
            replayed.append(handle.statistics["replayed_bytes"])
    assert replayed[0] == replayed[1] < replayed[2] == replayed[3]
    assert replayed[3] == Training(**HOST).counted["replayed_bytes"]


def test_log_probabilities_stay_exact() -> None:
    """Every gradient begins with them."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(64, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x)
            return torch.nn.functional.cross_entropy(scores, torch.arange(32))

    def gradient(**settings: Any) -> torch.Tensor:
        model = Loss()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        handle = offload_activations(model, min_bytes=MIN_BYTES, **settings) if settings else None
        model(x).backward()
        if handle is not None:
            assert handle.statistics["encoded_bytes"] == 0
            handle.close()
        assert model.linear.weight.grad is not None
        return model.linear.weight.grad

    assert torch.equal(gradient(codec="int8", **HOST), gradient())


def test_a_graph_is_used_again() -> None:
    model, x = net().eval(), noise()
    with offload_activations(model, min_bytes=MIN_BYTES, codec="int8", **HOST):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        first = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        loss.backward()
        again = [one.grad for one in model.parameters() if one.grad is not None]
    assert first and all(map(torch.equal, first, again))


@pytest.mark.parametrize("codec", CODECS)
def test_an_infinite_activation_is_found(codec: str) -> None:
    """A scaler that looks for overflows must see one."""
    model = net().eval()
    with torch.no_grad():
        model.blocks[1].up.bias[3] = float("inf")
    with offload_activations(model, min_bytes=MIN_BYTES, codec=codec, **HOST):
        model(noise()).square().mean().backward()
    found = [one.grad for one in model.parameters() if one.grad is not None]
    assert any(not bool(one.isfinite().all()) for one in found)


def test_what_is_changed_in_place_raises() -> None:
    class Changes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            z = y.pow(3)
            y.mul_(2)
            return z.sum()

    model = Changes()
    with offload_activations(model, min_bytes=MIN_BYTES, codec="int8", **HOST):
        loss = model(torch.randn(32, 64))
        with pytest.raises(ChangedInPlaceError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("codec", CODECS)
def test_the_summary_says_that_gradients_are_approximate(codec: str) -> None:
    model = net()
    handle = offload_activations(model, min_bytes=MIN_BYTES, codec=codec, **HOST)
    for seed in range(3):
        model(noise(seed)).sum().backward()
    said = handle.report()
    handle.close()
    assert "in few bits a value: gradients are approximate" in said


@pytest.mark.parametrize("replay", ["off", "on"])
@pytest.mark.parametrize(
    ("line", "placement"),
    [("replays", Placement.KEEP), ("encodes", Placement.KEEP), ("encodes", Placement.SSD)],
)
def test_a_plan_may_leave_a_layer_exact(
    line: str, placement: Placement, replay: str, tmp_path: Path
) -> None:
    """The last one, so that all its gradients are exact: nothing behind it is encoded."""

    def gradients_of(
        plan: Plan | None, **settings: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if plan is not None:
            save_plans(tmp_path / "plan.json", [plan])
            settings |= {"mode": "auto", "plan_file": tmp_path / "plan.json", "replay": replay}
        model = net()
        counted = Training(tmp_path, model=model, **settings).counted
        found = [
            {name: one.grad for name, one in block.named_parameters()} for block in model.blocks
        ]
        return found, counted

    def plan_of(*encoded: bool) -> Plan:
        parts = [
            PlannedPart(0, f"blocks.{n}", WHOLE_LAYER, placement, 0, **{line: one})
            for n, one in enumerate(encoded)
        ]
        return Plan(tuple(parts))

    exact, _ = gradients_of(None)
    last_exact, fewer = gradients_of(plan_of(True, True, False), codec="int8")
    all_encoded, more = gradients_of(plan_of(True, True, True), codec="int8")
    assert 0 < fewer["encoded_bytes"] < more["encoded_bytes"]
    replays_less = fewer["replayed_bytes"] < more["replayed_bytes"]
    assert replays_less is (line == "replays" and replay == "on")
    for name, one in exact[2].items():
        assert torch.equal(last_exact[2][name], one), name
    assert not all(torch.equal(all_encoded[2][name], one) for name, one in exact[2].items())
    assert not all(torch.equal(last_exact[0][name], one) for name, one in exact[0].items())


def test_with_auto_losses_are_the_same(tmp_path: Path) -> None:
    expected = Training(num_steps=8)
    auto = {"mode": "auto", "memory_budget_bytes": "1GiB"}
    found = Training(tmp_path, num_steps=8, codec="int8", **auto)
    assert all(map(torch.equal, found.losses, expected.losses))
    assert found.differs_from(expected) < 0.02


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "off"}, "give keep, ssd, host, tiered or auto instead"),
        ({"codec": "int2"}, "choose one of off, int8, int4"),
    ],
)
def test_what_does_not_go_together_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        offload_activations(net(), tmp_path, **{"codec": "int8", **settings})
