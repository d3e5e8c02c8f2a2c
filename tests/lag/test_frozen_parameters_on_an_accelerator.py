# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters of an accelerator: in few bits, and read from a saved model's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_parameters
from megatron.offload.device.open import open_device
from megatron.offload.parameters.file_tier import FileBlock, FileTier
from megatron.offload.parameters.weight_files import SavedPiece, WeightFiles
from megatron.offload.sizes import MIB
from tests.support.accelerators import assert_equal
from tests.support.frozen import round_matrices
from tests.support.lag.module import LagModule
from tests.support.training import Stack

DEVICE = "lag:1"  # new threads stand on another one
HIDDEN, LAYERS, STEPS = 32, 5, 3
DELAYS = ((60, 300), (600, 10), (300, 300))  # of a kernel and of a copy at most, in microseconds
SaveFile = Callable[[dict[str, torch.Tensor], Path], None]

pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.fixture
def save_file() -> SaveFile:
    """Writes a safetensors file."""
    found: SaveFile = pytest.importorskip("safetensors.torch").save_file
    return found


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def frozen_stack() -> Stack:
    model = Stack(HIDDEN, LAYERS)
    model.layers.requires_grad_(False)
    return model


def train_frozen(
    lag: LagModule, model: Stack, directory: Path | None, **settings: Any
) -> list[torch.Tensor]:
    """Losses and weights, in host memory; the layers are frozen."""
    lag.set_delays(*DELAYS[0], seed=0)  # they leave as soon as they are encoded
    with offload_parameters(model, directory, **settings) as handle:
        optimizer, found = torch.optim.SGD(model.first.parameters(), lr=0.1), []
        for number in range(2 * STEPS):
            lag.set_delays(*DELAYS[number % STEPS], seed=number)
            loss = model(batch(number))
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if settings.get("in_place"):
            assert handle.statistics["written_bytes"] == 0 < handle.statistics["read_bytes"]
            assert handle.statistics["peak_bytes"] < handle.statistics["parameter_bytes"]
        found += [one.cpu().clone() for one in model.state_dict().values()]
    lag.reset()
    found += [one.detach().cpu() for one in model.parameters()]
    return [one.cpu() for one in found]


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_frozen_layers_in_few_bits_are_those_of_a_model_rounded_in_memory(
    lag: LagModule, mode: str, tmp_path: Path
) -> None:
    other = frozen_stack()
    round_matrices(other.layers, "nf4")
    expected = train_frozen(lag, other.to(DEVICE), None, mode="off")
    directory = tmp_path if mode == "ssd" else None
    found = train_frozen(lag, frozen_stack().to(DEVICE), directory, codec="nf4")
    assert_equal(found, expected)


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_frozen_layers_are_read_where_they_are_in_files(
    lag: LagModule, save_file: SaveFile, mode: str, tmp_path: Path
) -> None:
    expected = train_frozen(lag, frozen_stack().to(DEVICE), None, mode="off")
    file = tmp_path / "model.safetensors"
    save_file(frozen_stack().state_dict(), file)
    before = file.read_bytes()
    directory = tmp_path if mode == "ssd" else None
    settings = {"mode": mode, "weights": file, "in_place": True}
    found = train_frozen(lag, frozen_stack().to(DEVICE), directory, **settings)
    assert_equal(found, expected)
    assert file.read_bytes() == before


def test_what_files_do_not_have_any_more_is_written(
    lag: LagModule, save_file: SaveFile, tmp_path: Path
) -> None:
    """A frozen layer that other code changes leaves for the drive, and the file stays."""
    file, x = tmp_path / "model.safetensors", batch(0)
    save_file(frozen_stack().state_dict(), file)
    before = file.read_bytes()
    other, model = frozen_stack().to(DEVICE).eval(), frozen_stack().to(DEVICE).eval()
    with offload_parameters(model, tmp_path, weights=file, in_place=True) as handle:
        for one in (other, model):
            with torch.no_grad():
                next(one.layers[2].parameters()).mul_(2)
        for _ in range(2):
            assert torch.equal(model(x).cpu(), other(x).cpu())
        assert handle.window is not None
        assert handle.statistics["written_bytes"] >= handle.window.units[2].num_bytes
    assert all(map(torch.equal, *([p.cpu() for p in one.parameters()] for one in (model, other))))
    assert file.read_bytes() == before


def test_tensors_of_files_pass_through_several_staging_buffers(
    lag: LagModule, save_file: SaveFile, tmp_path: Path
) -> None:
    """They begin anywhere in a file, and end anywhere in a buffer."""
    saved = {
        "odd": torch.arange(101, dtype=torch.uint8),
        "long": torch.arange(9 * MIB + 77, dtype=torch.int32),  # of 36 MiB, in buffers of 16
        "none": torch.empty(0),
    }
    save_file(saved, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    starts = {"odd": 3, "long": 256, "none": 0}
    num_bytes = 256 + saved["long"].nbytes
    device = open_device(torch.device(DEVICE))
    tier = FileTier(tmp_path, device)
    for name in saved:
        tier.open(files[name])
    block = FileBlock(tier, num_bytes, [SavedPiece(files[name], starts[name]) for name in saved])
    lag.set_delays(10, 3000, seed=4)
    for _ in range(2):
        storage, transfer = tier.begin_read(block)
        transfer.wait()
        device.use_after(storage, transfer.events or ())
        found = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).cpu()
        assert torch.equal(found[3:104], saved["odd"])
        assert torch.equal(found[256:], saved["long"].view(torch.uint8))
        assert block.has(storage)
    lag.reset()
    tier.close()


def rounded() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Frozen layers in few bits, what they get on the device, and what they make of it."""
    x = torch.randn(1, 512)
    layers = [torch.nn.Linear(512, 512, bias=False).requires_grad_(False) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    round_matrices(model, "int8")
    with torch.no_grad():
        return model, x.to(DEVICE), model(x)


def test_encoded_bytes_are_overwritten_when_they_are_decoded(lag: LagModule) -> None:
    """Frozen layers in few bits, launched before the first one runs."""
    main = lag.current_stream(DEVICE)
    model, on_device, expected = rounded()
    with offload_parameters(
        model.to(DEVICE), layers=[torch.nn.Linear], mode="host", codec="int8"
    ) as handle:
        with torch.no_grad():
            assert torch.equal(model(on_device).cpu(), expected)
            assert handle.window is not None
            for unit in handle.window.units:
                unit.wait_for_write()
            with lag.held(main):
                found = model(on_device)
        assert torch.equal(found.cpu(), expected)


def test_encoded_bytes_are_decoded_when_they_have_come(lag: LagModule) -> None:
    """Frozen layers in few bits, whose copies to the device run when a stream waits for them."""
    main = lag.current_stream(DEVICE)
    model, on_device, expected = rounded()
    with offload_parameters(
        model.to(DEVICE), layers=[torch.nn.Linear], mode="host", codec="int8"
    ) as handle:
        assert handle.window is not None
        for unit in handle.window.units:
            unit.wait_for_write()
        lag.synchronize(DEVICE)
        lag.late(handle.window.device._load, 0, unasked_seconds=20)
        with torch.no_grad():
            found = model(on_device)
        main.synchronize()  # which does not ask for the copies
        assert torch.equal(found.cpu(), expected)
