# SPDX-License-Identifier: Apache-2.0
"""Handles of `offload_activations`: several models, copies, threads, settings, reports, the end."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ConfigurationError,
    OffloadError,
    StorageError,
    offload_activations,
)
from megatron.offload.config import OffloadConfig
from megatron.offload.integration.output_head import OutputHead
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.stats import history
from tests.support.loops import gradients, net, noise
from tests.support.models import clone_of
from tests.support.processes import finish, start_python
from tests.support.same_training import digest


@pytest.mark.parametrize("together", [True, False], ids=["one handle", "two handles"])
def test_two_models_that_train_each_other(together: bool, tmp_path: Path) -> None:
    def run(folder: Path | None) -> list[str | None]:
        makes, judges = net(1), net(2)
        with contextlib.ExitStack() as stack:
            handles = []
            if folder is not None:
                groups: list[Any] = [[makes, judges]] if together else [makes, judges]
                handles = [
                    stack.enter_context(offload_activations(group, folder, min_bytes=1))
                    for group in groups
                ]
            torch.manual_seed(3)
            for seed in range(2):
                made = makes(noise(seed))
                loss = judges(made.detach()).mean() - judges(noise(seed + 5)).mean()
                loss.backward()
                judges(made).mean().backward()
            for handle in handles:
                assert handle.statistics["offloaded_storages"] > 10
            return gradients(makes, judges)

    assert run(tmp_path) == run(None)


def test_another_thread_is_left_alone(tmp_path: Path) -> None:
    model, other = net(), net(1)
    found: list[Any] = []

    def beside() -> None:
        other(noise()).sum().backward()
        found.append(gradients(other))

    def start(*_: Any) -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    model.blocks[1].register_forward_pre_hook(start)
    model.eval(), other.eval()
    with offload_activations([model, other], tmp_path, min_bytes=1):
        model(noise()).sum().backward()
    expected = net(1).eval()
    expected(noise()).sum().backward()
    assert found == [gradients(expected)]


def test_a_transform_of_torch_func_within_the_forward_pass_is_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    """As of models that learn while they are tested (Titans): torch allows no hooks there."""

    class Learning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(32, 32)
            self.transforms = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return torch.func.grad(lambda y: y.sin().sum())(x) if self.transforms else x.cos()

    model, x = Learning(), torch.randn(4, 32)
    with offload_activations(model, tmp_path, min_bytes=1):
        with pytest.raises(OffloadError, match=r"Learning runs a transform of torch\.func"):
            model(x)
        model.transforms = False  # and nothing of that pass is left
        model(x).sum().backward()
    found = model.inner.weight.grad
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.inner.weight.grad, found)


def test_transforms_of_torch_func_are_left_alone_and_said(tmp_path: Path, caplog: Any) -> None:
    model = net().eval()
    parameters = dict(model.named_parameters())

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,)).square().mean()

    def run() -> list[str]:
        one = torch.func.grad(loss)(parameters, noise())
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, noise()[:, None])
        return [digest(value) for found in (one, each) for value in found.values()]

    expected = run()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        assert run() == expected
        (said,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
        assert "transform of torch.func takes no hooks" in said
        model(noise()).sum().backward()
        assert offload.statistics["offloaded_storages"] > 10


def test_a_loss_that_computes_its_gradients_within_backward_is_told(
    tmp_path: Path, caplog: Any
) -> None:
    """As the Cached... losses of sentence-transformers do."""

    def run(settings: dict[str, Any]) -> list[str]:
        torch.manual_seed(3)
        model = net()
        handle = offload_activations(model, **settings)
        with handle:
            rows = noise()
            with torch.no_grad():
                results = model(rows)
            results.requires_grad_()

            def again(gradient: torch.Tensor) -> None:
                with torch.enable_grad():
                    model(rows).backward(gradient)  # type: ignore[no-untyped-call]

            results.register_hook(again)
            (results * 2).square().sum().backward()
        return [digest(one.grad) for one in model.parameters() if one.grad is not None]

    expected = run({"mode": "off"})
    assert run({"directory": tmp_path, "min_bytes": 1}) == expected and expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "is called with gradients within a backward pass" in said[0]


class Recurrent(torch.nn.LSTM):
    """It says itself what is copied of it, as every LSTM does, and so does its part."""

    def __init__(self) -> None:
        super().__init__(noise().shape[-1], 8)
        self.last = torch.nn.GRU(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out: torch.Tensor = self.last(super().forward(x)[0])[0]
        return out


@pytest.mark.parametrize("model_of", [net, Recurrent])
def test_a_copy_and_a_pickle_have_no_hooks(
    model_of: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    model = model_of()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (copy.deepcopy(model), loaded):
            other(noise()).sum().backward()
        assert offload.engine is None  # nobody has called the model
        model(noise()).sum().backward()
        copy.deepcopy(model)(noise()).sum().backward()


def adapted(model: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
    """As learn2learn's MAML does it: a step of gradient descent within the graph."""
    weights = list(model.parameters())
    found = torch.autograd.grad(model(x).square().mean(), weights, create_graph=True)
    pairs = zip(weights, found, strict=True)
    return clone_of(model, {id(one): one - 0.5 * gradient for one, gradient in pairs})


@pytest.mark.parametrize("settings", [{}, {"recompute_layers": "all"}], ids=["moves", "recomputes"])
def test_a_copy_of_attributes_computes_with_its_own_weights(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    def run(around: Callable[[torch.nn.Module], Any]) -> list[Any]:
        torch.manual_seed(3)
        model, found = net(), []
        with around(model):
            for _ in range(2):
                clone = adapted(model, noise())
                loss = clone(noise()).square().mean() + model(noise()).square().mean()
                loss.backward()
                found.append((digest(loss), gradients(model)))
            last = adapted(model, noise())
        found.append(digest(last(noise())))  # the handle is closed
        return found

    def moving(model: torch.nn.Module) -> Any:
        return offload_activations(model, tmp_path, min_bytes=1, **settings)

    assert run(moving) == run(contextlib.nullcontext)


def test_tied_and_meta_and_moved_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = net()
    offload = offload_activations(model, tmp_path, min_bytes=1)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.to(torch.bfloat16).eval()
    model(noise().bfloat16()).sum().backward()
    assert offload.statistics["offloaded_storages"] > 10
    offload.close()
    expected = copy.deepcopy(model)
    expected.zero_grad()
    expected(noise().bfloat16()).sum().backward()
    assert gradients(model) == gradients(expected)


def test_parameters_buffers_and_inputs_never_move(tmp_path: Path) -> None:
    class Saves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64))
            self.register_buffer("scale", torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.t() * self.scale).sum()  # saves all three, and one product

    model = Saves()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        for _ in range(2):
            model(torch.randn(64, 64)).backward()
            assert offload.statistics["offloaded_storages"] <= 1


@pytest.mark.filterwarnings("error")
def test_a_script_may_save_what_a_model_returns(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1) as handle:
        handle.log_steps(tmp_path / "steps.jsonl")
        result = model(noise())
        torch.save(result, tmp_path / "result")
        assert torch.equal(torch.load(tmp_path / "result"), result)


def test_one_handle_a_model(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path):
        for again in (model, torch.nn.Sequential(model), model.blocks):
            with pytest.raises(ConfigurationError, match="offloaded already"):
                offload_activations(again, tmp_path)
    offload_activations(model, tmp_path).close()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.nn.DataParallel(torch.nn.Linear(2, 2)), "use DistributedDataParallel"),
        (torch.jit.script(torch.nn.Linear(2, 2)), "TorchScript"),
        ([], "there is no model"),
        ("model", "is no torch.nn.Module"),
    ],
    ids=["DataParallel", "TorchScript", "none", "text"],
)
def test_what_cannot_be_served_is_refused(model: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        offload_activations(model, tmp_path)


def test_settings_have_the_names_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean min_bytes"):
        offload_activations(net(), tmp_path, min_byte=1)
    with pytest.raises(ConfigurationError, match="memory_budget_bytes is for mode auto"):
        offload_activations(net(), tmp_path, memory_budget_bytes="1GiB")
    with pytest.raises(ConfigurationError, match="recompute_input ssd is for the layers that"):
        offload_activations(net(), tmp_path, recompute_input="ssd")
    with pytest.raises(ConfigurationError, match=r"layers='Blok' names no module"):
        offload_activations(net(), tmp_path, layers=["Blok"])


def test_a_handle_that_nobody_gets_has_no_model(tmp_path: Path) -> None:
    class Fails(OutputHead):
        def __init__(self) -> None:
            pass

        def connect(self) -> None:
            raise ValueError("stop")

    (tmp_path / "file").touch()
    model = net()
    with pytest.raises(OSError, match="file"):
        offload_activations(model, tmp_path, metrics_file=tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(ValueError, match="stop"):
        ActivationOffload(OffloadConfig(mode="host"), [model], {}, replaced=[Fails()])
    assert not model._forward_pre_hooks and not model._forward_hooks
    offload_activations(model, tmp_path).close()


def test_a_metrics_file_without_room_ends_and_the_training_goes_on(
    tmp_path: Path, caplog: Any
) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1, metrics_file="/dev/full") as offload:
        for seed in range(3):
            model(noise(seed)).sum().backward()
            assert offload.statistics["offloaded_storages"] > 10
    (said,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert "the metrics file /dev/full cannot be written: No space left on device" in said


def test_off_touches_nothing(tmp_path: Path) -> None:
    model = net()
    offload = offload_activations(model, mode="off")
    assert not model._forward_pre_hooks and not model._forward_hooks
    model(noise()).sum().backward()
    assert offload.statistics == {} and offload.summary() == ""
    offload.close()


def test_the_report_says_what_was_found_and_the_summary_what_moved(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        for seed in range(3):
            model(noise(seed)).sum().backward()
        report = offload.report()
    assert "3: blocks.0 to blocks.2" in report and str(tmp_path) in report
    assert offload.summary() in report and "offloaded" in offload.summary()
    assert offload.statistics["offloaded_storages"] > 10  # also afterwards
    offload.close()


def test_a_user_is_told_when_nothing_moves(tmp_path: Path, caplog: Any) -> None:
    with offload_activations(net(), tmp_path) as offload:
        offload._models[0](noise()).sum().backward()
    with offload_activations(net(), tmp_path):
        pass
    said = [record.getMessage() for record in caplog.records]
    assert any("no saved storage has 1 MiB or more; lower min_bytes" in one for one in said)
    assert any("no forward pass with gradients was seen of Net" in one for one in said)


@pytest.mark.parametrize("mode", ["host", "ssd"])
def test_a_graph_that_outlives_its_handle_raises_and_the_model_goes_on(
    mode: str, tmp_path: Path
) -> None:
    model, expected = net().eval(), net().eval()
    offload = offload_activations(model, tmp_path, mode=mode, min_bytes=1)
    loss = model(noise()).sum()
    assert offload.engine is not None and offload.engine.wait_for_writes(30)
    offload.close()
    advice = r"the tier is closed; .* call close\(\) of the handle after the backward pass"
    with pytest.raises(StorageError, match=advice):
        loss.backward()
    model.zero_grad()
    model(noise()).sum().backward()
    expected(noise()).sum().backward()
    assert gradients(model) == gradients(expected)


def test_what_a_tier_has_no_room_for_stays(tmp_path: Path) -> None:
    model, expected = net().eval(), net().eval()
    with offload_activations(model, tmp_path, min_bytes=1, ssd_budget_bytes="32KiB") as offload:
        loss = model(noise()).sum()
        assert offload.engine is not None and offload.engine.wait_for_writes(30)
        loss.backward()
        assert offload.statistics["rejected_bytes"] > 0 < offload.statistics["offloaded_bytes"]
    expected(noise()).sum().backward()
    assert gradients(model) == gradients(expected)


@pytest.mark.slow
def test_a_program_may_end_without_closing(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from megatron.offload import offload_activations
        linear = torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(linear, torch.nn.GELU(), torch.nn.Linear(64, 64))
        offload_activations(model, sys.argv[1], min_bytes=1, metrics_file=sys.argv[1] + "/m.jsonl")
        for _ in range(2):
            model(torch.randn(64, 64)).sum().backward()
        loss = model(torch.randn(64, 64)).sum()
    """
    code, _, errors = finish(start_python(script, tmp_path))
    assert (code, errors) == (0, "")
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_nothing_grows_with_the_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_REMEMBERED_STEPS", 8)  # instead of 1000: the test is not as long
    model = net().eval()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:

        def objects_after(num_steps: int) -> int:
            for seed in range(num_steps):
                model(noise(seed)).sum().backward()
            gc.collect()
            return len(gc.get_objects())

        counts = [objects_after(80)]
        counts += [objects_after(60) for _ in range(3)]
        # Threads of others come and go meanwhile: what a step leaves behind is seen in each round.
        assert min(after - before for before, after in itertools.pairwise(counts)) < 20
        assert offload.engine is not None and offload.engine.cache.num_records < 5


def test_a_layer_may_be_the_outermost_call(tmp_path: Path) -> None:
    model = net().eval()
    expected = copy.deepcopy(model)
    with offload_activations(model, tmp_path, min_bytes=1, layers=["Block"]):
        model.blocks[0](noise()).sum().backward()
    expected.blocks[0](noise()).sum().backward()
    assert gradients(model) == gradients(expected)
