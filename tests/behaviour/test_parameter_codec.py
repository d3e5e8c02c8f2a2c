# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters that a tier has in few bits: the training of a model rounded in memory."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, LayerMajor, offload, offload_parameters
from megatron.offload.errors import LostStateError, OffloadError
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.moving.storage import Where
from megatron.offload.parameters.encoded_unit import EncodedUnit
from megatron.offload.parameters.weight_codec import CODECS
from megatron.offload.tiers.ssd import SsdTier
from tests.support.beneath import beneath
from tests.support.frozen import round_matrices

HIDDEN, LAYERS = 64, 5
CODEC_NAMES = sorted(CODECS)


class Adapted(torch.nn.Module):
    """A layer with a frozen matrix, bias and norm, and a low-rank adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up, self.down = (
            torch.nn.Linear(HIDDEN, 4 * HIDDEN),
            torch.nn.Linear(4 * HIDDEN, HIDDEN),
        )
        self.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(2, HIDDEN) / 8)
        self.b = torch.nn.Parameter(torch.zeros(4 * HIDDEN, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.up(y) + y @ self.a.T @ self.b.T
        y = self.down(torch.nn.functional.gelu(y))
        return x + y


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(Adapted() for _ in range(LAYERS))
        self.head = torch.nn.Linear(HIDDEN, 8)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def rounded(model: Model, codec: str) -> Model:
    """The model with its frozen matrices rounded in memory."""
    round_matrices(model.layers, codec)
    return model


def batches(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(4, HIDDEN, generator=draw).to(dtype) for _ in range(2)]


def train(model: Model, steps: int = 3, layer_major: LayerMajor | None = None) -> list[float]:
    """Losses; the adapters and the head are trained."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = batches(step, trained[0].dtype)
        if layer_major is not None:
            losses += [float(one) for one in layer_major.step(inputs, model)]
        else:
            for one in inputs:
                loss = model(one)
                loss.backward()
                losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def settle(offloaded: ParameterOffload) -> None:
    """What leaves has left: a write that has not ended is taken back when its unit is needed."""
    assert offloaded.window is not None
    for unit in offloaded.window.units:
        unit.wait_for_write()


def assert_same_weights(model: Model, other: Model) -> None:
    own = model.state_dict()
    for name, weight in other.state_dict().items():
        assert torch.equal(own[name], weight), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["ssd", "host", "tiered"])
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_training_is_that_of_a_model_rounded_in_memory(
    tmp_path: Path, codec: str, mode: str, dtype: torch.dtype
) -> None:
    in_memory = rounded(Model(dtype), codec)
    expected = train(in_memory)
    model = Model(dtype)
    directory = None if mode == "host" else tmp_path
    with offload_parameters(model, directory, mode=mode, codec=codec) as offloaded:
        assert train(model) == expected
        assert_same_weights(model, in_memory)
        train(model, 1)
        train(in_memory, 1)
    assert_same_weights(model, in_memory)
    assert offloaded.report() == "parameters are in memory"


@pytest.mark.parametrize(("codec", "ratio"), [("int8", 0.52), ("nf4", 0.275)])
def test_few_bits_move(tmp_path: Path, codec: str, ratio: float) -> None:
    read, written = {}, {}
    for one in ("off", codec):
        model = Model(torch.bfloat16)
        with offload_parameters(model, tmp_path, codec=one) as offloaded:
            settle(offloaded)
            train(model)
            found = offloaded.statistics
            read[one], written[one] = found["read_bytes"], found["written_bytes"]
            assert found["written_bytes"] == found["moved_bytes"]  # once, however many steps
            assert ("encoded to" in offloaded.report()) == (one != "off")
    # Norms, biases and whole pages are in these small layers' bytes.
    page_part = 0.03
    assert read[codec] <= (ratio + page_part) * read["off"]
    assert written[codec] <= (ratio + page_part) * written["off"]


class Routed(torch.nn.Module):
    """A layer with a matrix for a few experts beside much larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, 4, bias=False)
        self.wide = torch.nn.Parameter(torch.randn(4, 1050, HIDDEN) / 8)
        self.near = torch.nn.Linear(HIDDEN, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).softmax(-1)
        wide = torch.einsum("...h,ewh,...e->...w", x, self.wide, chosen)
        return x + wide[..., :HIDDEN] + self.near(x).sum(-1, keepdim=True)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_router_stays_exact(tmp_path: Path, codec: str) -> None:
    """It has less than a thousandth of the largest matrix, and another small one has more."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(Routed() for _ in range(3))).requires_grad_(False)
    expected = {name: one.clone() for name, one in model.state_dict().items()}
    for name, one in expected.items():
        if "gate" not in name:
            module = torch.nn.ParameterList([torch.nn.Parameter(one, requires_grad=False)])
            round_matrices(module, codec)
            assert not torch.equal(one, model.state_dict()[name])
    with offload_parameters(model, tmp_path, layers=[Routed], codec=codec) as offloaded:
        found = model.state_dict()
        assert all(torch.equal(found[name], one) for name, one in expected.items())
        unit = shown(offloaded)[0]
        number = 4 * 1050 * HIDDEN + 5 * HIDDEN
        least = CODECS[codec].encoded_bytes(number, torch.float32) + 4 * HIDDEN * 4
        assert least <= unit.moved_bytes <= least + 3 * 4096


def test_adapters_stay_in_memory_and_the_rest_is_never_written_again(tmp_path: Path) -> None:
    model = Model()
    with offload_parameters(model, tmp_path) as offloaded:
        settle(offloaded)
        before = offloaded.statistics["written_bytes"]
        train(model)
        assert offloaded.window is not None
        assert not any(offloaded.window.has(layer.a) for layer in model.layers)
        assert offloaded.window.has(model.layers[0].up.weight)
        assert offloaded.statistics["written_bytes"] == before


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_layer_major_steps(tmp_path: Path, codec: str) -> None:
    in_memory = rounded(Model(), codec)
    expected = train(in_memory, layer_major=LayerMajor(in_memory))
    model = Model()
    with offload_parameters(model, tmp_path, codec=codec):
        assert train(model, layer_major=LayerMajor(model)) == expected
        assert_same_weights(model, in_memory)


def test_with_all_that_moves(tmp_path: Path) -> None:
    in_memory = rounded(Model(), "nf4")
    expected = train(in_memory)
    model = Model()
    with offload(model, None, tmp_path, activations={"min_bytes": 1}, parameters={"codec": "nf4"}):
        assert train(model) == expected
    assert_same_weights(model, in_memory)


# -- Between steps --------------------------------------------------------------------------------


def shown(offloaded: ParameterOffload) -> list[EncodedUnit]:
    assert offloaded.window is not None
    units = offloaded.window.units
    assert all(isinstance(unit, EncodedUnit) for unit in units)
    return units  # type: ignore[return-value]


def test_a_saved_model_does_not_come_to_memory(tmp_path: Path) -> None:
    in_memory = rounded(Model(), "int8")
    model = Model()
    with offload_parameters(model, tmp_path, codec="int8") as offloaded:
        model(batches(0, torch.float32)[0])
        settle(offloaded)
        saved = model.state_dict()
        assert offloaded.window is not None
        assert offloaded.window.memory_bytes <= 2 * shown(offloaded)[0].num_bytes
        for name, weight in in_memory.state_dict().items():
            assert torch.equal(saved[name], weight), name
        train(model, 1)
        # Holders keep the values that they have seen.
        assert torch.equal(saved["layers.0.up.weight"], in_memory.layers[0].up.weight)


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_model_that_is_saved_often_is_written_once(tmp_path: Path, mode: str) -> None:
    in_memory = rounded(Model(), "int8")
    model = Model()
    directory = None if mode == "host" else tmp_path
    with offload_parameters(model, directory, mode=mode, codec="int8") as offloaded:
        assert offloaded.window is not None
        written, used = [], []
        for _ in range(5):
            settle(offloaded)
            assert_same_weights(model, in_memory)
            written.append(offloaded.statistics["written_bytes"])
            model(batches(0, torch.float32)[0])
            used.append(sum(tier.used_bytes for tier in offloaded.window.tiers))
        if mode == "ssd":
            # Those in memory are shown from there, and leave like changed ones.
            unit = shown(offloaded)[0]
            live_bytes = 2 * (unit.num_bytes + unit.moved_bytes)
            assert all(after - before <= live_bytes for before, after in pairwise(written))
        else:
            assert max(used) <= offloaded.statistics["moved_bytes"]
        with torch.no_grad():
            for layer, other in zip(model.layers, in_memory.layers, strict=True):
                for one in (layer, other):
                    one.up.weight.mul_(2)  # to which nothing has to be rounded
        assert_same_weights(model, in_memory)


def test_a_copy_that_was_changed_behind_is_not_shown_again(tmp_path: Path) -> None:
    in_memory = rounded(Model(), "int8")
    model = Model()
    with offload_parameters(model, tmp_path, codec="int8") as offloaded:
        settle(offloaded)
        held = model.state_dict()
        model(batches(0, torch.float32)[0])
        for name, one in held.items():
            if name.endswith("up.weight"):
                one.data.fill_(7)  # of no parameter by now
        for _ in range(2):
            settle(offloaded)
            assert_same_weights(model, in_memory)
            assert offloaded.window is not None
            memory_bytes = offloaded.window.memory_bytes
            model(batches(0, torch.float32)[0])
        assert memory_bytes <= 2 * shown(offloaded)[0].num_bytes  # the second time from new copies


def test_a_saved_model_that_is_loaded_again_is_not_rounded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(torch.bfloat16)
    with offload_parameters(model, tmp_path, codec="int8"):
        saved = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(saved)
        train(model, 1)
        for name, one in model.state_dict().items():
            if "layers" in name and not name.endswith((".a", ".b")):
                assert torch.equal(one, saved[name]), name
    assert "rounded" not in caplog.text


@pytest.mark.parametrize("how", ["in place", "through data", "replaced", "loaded", "in its layer"])
@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_changed_weight_is_rounded_and_that_is_said(
    tmp_path: Path, mode: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    new = torch.randn(4 * HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))

    def change(model: Model) -> None:
        weight = model.layers[2].up.weight
        if how == "in place":
            with torch.no_grad():
                weight.copy_(new)
        elif how == "through data":
            weight.data.view(-1).copy_(new.view(-1))
        elif how == "replaced":
            weight.data = new.clone()
        elif how == "loaded":
            model.load_state_dict({**model.state_dict(), "layers.2.up.weight": new})
        else:

            def in_forward(module: torch.nn.Module, _: Any) -> None:
                with torch.no_grad():
                    model.layers[2].up.weight.copy_(new)

            hook = model.layers[2].norm.register_forward_pre_hook(in_forward)
            model(batches(0, torch.float32)[0])
            hook.remove()

    in_memory = rounded(Model(), "int8")
    change(in_memory)
    rounded(in_memory, "int8")
    expected = train(in_memory)
    model = Model()
    with offload_parameters(model, None if mode == "host" else tmp_path, codec="int8"):
        change(model)
        assert train(model) == expected
    assert_same_weights(model, in_memory)
    assert caplog.text.count("rounded to int8") == 1


def test_a_frozen_weight_that_is_to_be_trained_is_refused(tmp_path: Path) -> None:
    model = Model()
    with offload_parameters(model, tmp_path, codec="nf4"):
        model.layers[3].up.weight.requires_grad_(True)
        with pytest.raises(OffloadError, match="were frozen when they were offloaded"):
            train(model)
    assert_same_weights(model, rounded(Model(), "nf4"))


def test_a_codec_for_no_frozen_layer_is_refused(tmp_path: Path) -> None:
    model = Model().requires_grad_(True)
    with pytest.raises(ConfigurationError, match="codec int8 is for layers"):
        offload_parameters(model, tmp_path, codec="int8")
    with pytest.raises(ConfigurationError, match="codec int8 is for parameters that wait"):
        offload_parameters(model, mode="off", codec="int8")


def test_trained_layers_keep_every_bit(tmp_path: Path) -> None:
    in_memory, model = Model(), Model()
    for one in (in_memory, model):
        one.layers[4].requires_grad_(True)
    last = {name: one.clone() for name, one in in_memory.layers[4].state_dict().items()}
    rounded(in_memory, "int8")
    in_memory.layers[4].load_state_dict(last)
    expected = train(in_memory)
    with offload_parameters(model, tmp_path, codec="int8") as offloaded:
        assert offloaded.window is not None
        kinds = [isinstance(unit, EncodedUnit) for unit in offloaded.window.units]
        assert kinds == [True, True, True, True, False]
        assert train(model) == expected
    assert_same_weights(model, in_memory)


def test_an_optimizer_with_frozen_parameters_leaves_them_where_they_are(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offload_parameters(model, tmp_path, codec="int8") as offloaded:
        settle(offloaded)
        for step in range(3):
            model(batches(step, torch.float32)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = offloaded.statistics
        assert found["peak_bytes"] <= 3 * shown(offloaded)[0].num_bytes
        assert found["written_bytes"] == found["moved_bytes"]


def test_a_number_that_is_none_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].up.weight[3, 5] = float("inf")
    with offload_parameters(model, tmp_path, codec="int8"):
        assert caplog.text.count("a matrix of unit 2 of 5 has an infinite value or a NaN") == 1


def test_a_unit_that_is_still_being_written_is_shown(tmp_path: Path) -> None:
    model = Model()
    with offload_parameters(model, tmp_path, codec="int8", write_bytes_per_s="200KB/s"):
        assert_same_weights(model, rounded(Model(), "int8"))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_read_that_another_thread_gives_up_is_made_again(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(rounded(Model(), codec))
    model = Model()
    arrived, times = EncodedUnit._arrived, []

    def given_up(unit: EncodedUnit, events: Any) -> Any:
        times.append(unit)
        if len(times) % 3 == 1:
            thread = threading.Thread(target=unit.give_up_read)
            thread.start()
            thread.join()
        return arrived(unit, events)

    monkeypatch.setattr(EncodedUnit, "_arrived", given_up)
    with offload_parameters(model, tmp_path, codec=codec):
        assert train(model) == expected
    assert len(times) > 10


# -- Faults ---------------------------------------------------------------------------------------


def test_what_no_tier_has_room_for_stays_and_has_the_same_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_memory = rounded(Model(), "int8")
    expected = train(in_memory)
    model = Model()
    with offload_parameters(model, mode="host", host_budget=1 << 17, codec="int8") as offloaded:
        settle(offloaded)
        assert {unit.where for unit in shown(offloaded)} == {Where.IN_MEMORY, Where.ON_TIER}
        assert train(model) == expected
        assert_same_weights(model, in_memory)  # shown where there is no room for values either
        assert train(model, 1) == train(in_memory, 1)
    assert "they stay in memory" in caplog.text
    assert "in full size" in caplog.text and "make room on the disk" in caplog.text


@pytest.mark.parametrize("times", [1, 2], ids=["once", "for good"])
def test_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    expected = train(rounded(Model(), "int8"), 1)
    model = Model()
    begin, left = SsdTier.begin_read, [times]

    def fails(self: SsdTier, block: Any, *args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return begin(self, block, *args, **kwargs)

    offloaded = offload_parameters(model, tmp_path, codec="int8")
    for unit in shown(offloaded):
        unit.wait_for_write()
    monkeypatch.setattr(SsdTier, "begin_read", fails)
    if times == 1:
        assert train(model, 1) == expected
        offloaded.close()
        return
    with pytest.raises(LostStateError, match="could not be read back"):
        train(model, 1)
    offloaded.close()  # what could not be read then can be read now
    assert_same_weights(model, rounded(Model(), "int8"))


def test_a_changed_block_is_noticed_before_it_is_shown(tmp_path: Path) -> None:
    model = Model()
    offloaded = offload_parameters(model, tmp_path, codec="int8")
    model(batches(0, torch.float32)[0])
    settle(offloaded)
    unit = next(one for one in shown(offloaded) if one.where is Where.ON_TIER)
    view = unit.block.tier.view(unit.block)
    torch.empty(0, dtype=torch.uint8).set_(view)[100:200] += 1
    with pytest.raises(LostStateError):
        model.state_dict()
    offloaded.close(restore=False)
    number = [layer.up.weight for layer in model.layers]
    assert any(beneath(one).isnan().all() for one in number)
