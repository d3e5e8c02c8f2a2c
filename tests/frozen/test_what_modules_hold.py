# SPDX-License-Identifier: Apache-2.0
"""`cache_frozen`: what decides a frozen part's bits beside its weights, or comes out of it beside
its result."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron.offload import ConfigurationError, cache_frozen
from tests.support.full_disk import one_warning_about

ROWS = 3


class Settings:
    """An object that modules share, as configurations and processors of attention are."""

    def __init__(self) -> None:
        self.scales = {"default": [1.0, 2.0]}


def _added(x: torch.Tensor, much: float) -> torch.Tensor:
    return x + much


def _adding(much: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + much


class Tower(torch.nn.Module):
    """Has all kinds of attributes, which all have a part in its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.scaling = {"default": 2.0}
        self.pairs = [[1.0, 2.0], [3.0]]
        self.table = torch.arange(4.0)
        self.array = numpy.arange(4.0, dtype=numpy.float32)
        self.settings = Settings()
        self.closure = _adding(1.0)
        self.partial = functools.partial(_added, much=1.0)
        self.hidden = [torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.scaling["default"] + self.pairs[0][1] + self.table
        x = x + torch.from_numpy(self.array) * self.settings.scales["default"][1]
        return self.hidden[0](self.partial(self.closure(x)))


def _replace(name: str, value: Any) -> Callable[[Tower], None]:
    return lambda tower: setattr(tower, name, value)


CHANGES: dict[str, Callable[[Tower], Any]] = {
    "dict": lambda tower: tower.scaling.update(default=3.0),
    "list in a list": lambda tower: tower.pairs[0].__setitem__(1, 5.0),
    "tensor": lambda tower: setattr(tower, "table", torch.ones(4)),
    "tensor in place": lambda tower: tower.table.add_(1),
    "array": lambda tower: tower.array.__setitem__(2, 7.0),
    "object": lambda tower: tower.settings.scales["default"].__setitem__(1, 4.0),
    "closure": _replace("closure", _adding(2.0)),
    "partial": _replace("partial", functools.partial(_added, much=2.0)),
    "hidden weight": lambda tower: tower.hidden[0][0].bias.data.add_(1),
}


def _model() -> Any:
    return torch.nn.Sequential(Tower().requires_grad_(False), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_attribute_holds_is_part_of_the_key(tmp_path: Path, change: str) -> None:
    """Between two passes, and between two runs whose files are the same."""
    model, x, hits = _model(), torch.randn(ROWS, 4), []
    with cache_frozen(model, tmp_path) as features:
        for number in range(4):
            if number == 2:
                CHANGES[change](model[0])
            assert torch.equal(model(x), copy.deepcopy(model)(x)), number
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"])
    assert hits == [0, ROWS, ROWS, 2 * ROWS]
    for changed in (False, True):
        other = _model()
        if changed:
            CHANGES[change](other[0])
        with cache_frozen(other, tmp_path) as features:
            assert torch.equal(other(x), copy.deepcopy(other)(x))
            assert features.statistics["hit_rows"] == ROWS  # of the files of the first run


def _of_python(_: torch.nn.Module) -> float:
    return random.random()


def _of_numpy(_: torch.nn.Module) -> float:
    return float(numpy.random.rand())


def _of_its_own(module: Any) -> float:
    return float(torch.rand((), generator=module.generator))


@pytest.mark.parametrize("draw", [_of_python, _of_numpy, _of_its_own])
def test_random_numbers_that_are_not_torch_s_are_refused(
    tmp_path: Path, draw: Callable[[Any], float]
) -> None:
    """As masks of Wav2Vec2's spectrograms are, which numpy draws in training."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + (draw(self) if self.training else 0.0)

    model = torch.nn.Sequential(Masked().requires_grad_(False), torch.nn.Linear(4, 2))
    x = torch.randn(ROWS, 4)
    with cache_frozen(model, tmp_path) as features:
        with pytest.raises(ConfigurationError, match="draws random numbers"):
            model(x)
        model(x)  # and from now on it is computed
        assert features.store.num_stored == 0
    model.eval()
    with cache_frozen(model, tmp_path) as features:
        for _ in range(2):
            model(x)
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == ROWS


@pytest.mark.parametrize("change", ["factor", "weight"])
def test_what_has_replaced_an_inner_forward_is_part_of_the_key(tmp_path: Path, change: str) -> None:
    """As adapters do that are no modules of the model's, with a factor of their own."""

    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.down, self.factor, self.own = torch.nn.Linear(4, 4), 1.0, base.forward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x) + self.factor * self.down(x)

    model, x, hits = _model(), torch.randn(ROWS, 4), []
    linear = model[0].linear
    adapter = Adapter(linear).requires_grad_(False)
    linear.forward = adapter.forward

    def expected() -> torch.Tensor:
        with torch.no_grad():
            return model[1](Tower.forward(model[0], x))

    with cache_frozen(model, tmp_path) as features:
        for number in range(4):
            if number == 2 and change == "factor":
                adapter.factor = 2.0
            elif number == 2:
                adapter.down.weight.mul_(2.0)
            assert torch.equal(model(x), expected())
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"] // ROWS)
        assert hits == [0, 1, 1, 2]
        adapter.requires_grad_(True)
        assert model(x).sum().backward() is None and adapter.down.weight.grad is not None
        assert features.statistics["hit_rows"] == 2 * ROWS


ADAPTERS: dict[str, torch.nn.Module] = {}


@pytest.mark.parametrize("input_wants", [False, True])
def test_a_part_in_which_something_else_is_trained_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, input_wants: bool
) -> None:
    """Adapters that nothing in the part leads to."""
    adapter = ADAPTERS["one"] = torch.nn.Linear(4, 4)

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + ADAPTERS["one"](x)

    model = torch.nn.Sequential(torch.nn.Identity(), Tower(), torch.nn.Linear(4, 2))
    model[1].requires_grad_(False)
    if input_wants:

        def make_inputs_require_grads(module: Any, args: Any, output: torch.Tensor) -> None:
            output.requires_grad_(True)

        model[0].register_forward_hook(make_inputs_require_grads)
    optimizer = torch.optim.SGD([*adapter.parameters(), *model[2].parameters()], 0.1)
    x = torch.randn(ROWS, 4)
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            loss: Any = model(x.clone()).square().sum()
            assert loss == model[2](model[1].inner(x) + adapter(x)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            assert adapter.weight.grad is not None and adapter.weight.grad.any()
            optimizer.step()
            features.store.wait_for_writes()
        assert features.store.num_stored == 0
    one_warning_about("something else than its own weights is trained in it", caplog)


def test_a_part_that_asks_for_gradients_that_nothing_needs_is_stored(tmp_path: Path) -> None:
    """As Wav2Vec2's feature encoder does in training, for its checkpoints."""

    class Asking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.clone().requires_grad_(self.training))

    model = torch.nn.Sequential(Asking().requires_grad_(False), torch.nn.Linear(4, 2))
    with cache_frozen(model, tmp_path) as features:
        for _ in range(2):
            x = torch.ones(ROWS, 4)
            assert torch.equal(model(x), copy.deepcopy(model)(x))
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == ROWS


def test_a_part_that_hands_something_on_by_its_attributes_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass that is skipped would leave there what another batch has put there."""

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.attention: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.attention = x.softmax(-1)
            return self.inner(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower().requires_grad_(False)
            self.head = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.tower(x)) * self.tower.attention

    model = Model()
    batches = torch.randn(2, ROWS, 4)
    with cache_frozen(model, tmp_path) as features:
        for x in (*batches, *batches):
            assert torch.equal(model(x), copy.deepcopy(model)(x))
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == 0
    one_warning_about("their attribute attention", caplog)


def test_a_part_that_fills_an_attribute_once_is_stored_from_then_on(tmp_path: Path) -> None:
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.table: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(4.0)
            return self.inner(x) + self.table

    model = torch.nn.Sequential(Tower().requires_grad_(False), torch.nn.Linear(4, 2))
    x, hits = torch.randn(ROWS, 4), []
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            assert torch.equal(model(x), copy.deepcopy(model)(x))
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"])
    assert hits == [0, 0, ROWS]


class WritesToItsArguments(torch.nn.Module):
    """Leaves something in what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        if isinstance(kept, list):
            kept.append(result)
        elif isinstance(kept, dict):
            kept["result"] = result
        else:
            kept.add_(1)
        return result


class UsesWhatIsWritten(torch.nn.Module):
    """Some frozen modules, and a trained one that gets what these have left."""

    def __init__(self, num_frozen: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.ModuleList(
            WritesToItsArguments() for _ in range(num_frozen)
        ).requires_grad_(False)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        for one in self.frozen:
            x = one(x, kept)
        values = kept.values() if isinstance(kept, dict) else kept
        result: torch.Tensor = self.head(sum(values, x))
        return result


@pytest.mark.parametrize("make", [list, dict, lambda: torch.zeros(1, 4)])
@pytest.mark.parametrize("num_frozen", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_part_that_writes_to_its_arguments_is_computed(
    make: Callable[[], Any],
    num_frozen: int,
    num_rows: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = UsesWhatIsWritten(num_frozen)
    x = torch.randn(num_rows, 4)
    expected = model(x, make())
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            assert torch.equal(model(x, make()), expected)
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == 0
    one_warning_about("its arguments change in place while it computes", caplog)


class Neighbours(torch.nn.Module):
    """Adds up what neighbours have, by a sparse matrix."""

    def __init__(self, matrix: torch.Tensor | None) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("matrix", matrix)

    def forward(self, x: torch.Tensor, matrix: torch.Tensor | None = None) -> torch.Tensor:
        return torch.sparse.mm(self.matrix if matrix is None else matrix, self.inner(x))


class GivesSparse(torch.nn.Module):
    """Returns a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).to_sparse()


@pytest.mark.parametrize("is_of", ["an argument", "a buffer", "the result"])
@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_part_with_sparse_tensors_is_computed(
    is_of: str, to_sparse: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    matrix, x = to_sparse(torch.eye(ROWS) + 1), torch.randn(ROWS, 4)
    part = Neighbours(matrix if is_of == "a buffer" else None)
    model = torch.nn.ModuleList([GivesSparse() if is_of == "the result" else part])
    model.requires_grad_(False).append(torch.nn.Linear(4, 1))
    given = [x, matrix] if is_of == "an argument" else [x]
    expected = model[0](*given)
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            assert torch.equal(model[0](*given).to_dense(), expected.to_dense())
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == 0


def test_a_part_within_a_transform_is_computed(tmp_path: Path) -> None:
    """Gradients of each row by themselves, say."""
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).requires_grad_(False),
        torch.nn.Linear(4, 1),
    )
    trained = {name: one.detach() for name, one in model[1].named_parameters(prefix="1")}
    rows = torch.randn(ROWS, 4)

    def gradients() -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(model, parameters, (row[None],))
            return result.sum()

        found: dict[str, torch.Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0))(
            trained, rows
        )
        return found

    expected = gradients()
    with cache_frozen(model, tmp_path) as features:
        model(rows)
        found = gradients()
        features.store.wait_for_writes()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_what_fp32_is_computed_in_is_part_of_the_key(tmp_path: Path) -> None:
    """Also where a script sets it in the new way, after which torch's old one raises."""
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).requires_grad_(False),
        torch.nn.Linear(4, 1),
    )
    x, hits = torch.randn(ROWS, 4), []
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        with cache_frozen(model, tmp_path) as features:
            for precision in ("ieee", "ieee", "tf32", "tf32"):
                matmul.fp32_precision = precision
                model(x)
                features.store.wait_for_writes()
                hits.append(features.statistics["hit_rows"])
    finally:
        matmul.fp32_precision = before
    assert hits == [0, ROWS, ROWS, 2 * ROWS]


class HandsOn(torch.nn.Module):
    """Returns what it gets besides its own result, or makes that for those behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            bias = x.mean(0).expand(x.shape) + x
        return self.inner(x) + bias, bias


@pytest.mark.parametrize("num_frozen", [1, 3])
@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_a_part_that_hands_its_input_on_is_computed(
    num_frozen: int, num_rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model may change it there, and finds the change where it has it from."""
    model = torch.nn.ModuleList(HandsOn() for _ in range(num_frozen))
    model.requires_grad_(False).append(torch.nn.Linear(4, 1))
    rows = torch.randn(num_rows, 4)

    def result() -> torch.Tensor:
        x, given = rows, torch.zeros(num_rows, 4)
        bias = given
        for one in model[:num_frozen]:
            x, bias = one(x, bias)
        bias += x
        return given

    expected = result()
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            assert torch.equal(result(), expected)
            features.store.wait_for_writes()
    one_warning_about("it returns a part of its input, which cannot be stored", caplog)


class HandsNothingOn(HandsOn):
    """Returns its own result alone."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return super().forward(x, bias)[0]


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_what_modules_hand_on_may_be_of_all_rows(
    num_rows: int, is_given: bool, tmp_path: Path
) -> None:
    """It is what the first one makes of all rows, or gets."""
    model = torch.nn.ModuleList([HandsOn(), HandsOn(), HandsNothingOn()])
    model.requires_grad_(False).append(torch.nn.Linear(4, 1))

    def result(rows: torch.Tensor) -> torch.Tensor:
        x, bias = model[0](rows, 2 * rows if is_given else None)
        last: torch.Tensor = model[2](*model[1](x, bias))
        return last

    batches = [torch.randn(num_rows, 4) for _ in range(2)]
    batches += [one[torch.randperm(num_rows)] for one in batches]
    batches.append(torch.cat(batches[:2])[::2][:num_rows].contiguous())
    expected = [result(one) for one in batches]
    with cache_frozen(model, tmp_path) as features:
        for batch, one in zip(batches * 2, expected * 2, strict=True):
            assert torch.equal(result(batch), one)
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] > 0
