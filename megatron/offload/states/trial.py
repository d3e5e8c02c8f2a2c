# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer updates each parameter by its own gradient and state alone: `Trial`.

Before the first step in slices (`optimizer_slice.py`), the optimizer's own step updates a few small
tensors together, and once more in slices; then their bits are compared. The trial changes neither
the optimizer nor a random generator: it uses copies, or restores what it used.

Note [What shows in a trial]
These show: sums over parameters (a norm of all gradients), random numbers, which slices would give
to other parameters, and lists or dicts of the optimizer that each slice changes. The tensors have
the types and numbers of dimensions of the parameters, because optimizers treat matrices and vectors
in different ways. Their values are random: real gradients may be zero in a first step, and
parameters may be away. What an optimizer does only in later steps, or only with larger tensors,
does not show.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.errors import STATES_PREFIX, ConfigurationError, OffloadError
from megatron.offload.states.sharded import local_of
from megatron.offload.states.unsliced_state import refusal

logger = logging.getLogger(__name__)

_NUM_STEPS = 4
_NUM_REPEATS = 4  # of steps that seem to depend on other parameters
_OF_A_KIND = 2  # tensors of each kind
_MOST_TENSORS = 16
_MOST_IN_VECTOR, _MOST_IN_DIMENSION, _MOST_NUMBERS = 4096, 64, 1 << 16
_LEAST_LR = 1e-3  # a warm-up begins at 0, which would hide every difference
_GRADIENTS = ("grad", "decoupled_grad")  # attributes of a parameter; the latter is Megatron's
_HOOKS = re.compile(r"_optimizer_\w+_hooks$")  # attributes of an optimizer

# Runs an optimizer's own step for slices of its parameters, which keep their places in groups or
# do not; `OptimizerSlice` implements it.
Steps = Callable[[torch.optim.Optimizer, Sequence[Sequence[torch.Tensor]], bool], None]


class Trial:
    """A trial of an optimizer's step.

    Args:
        optimizer: whose step is tried.
        steps: runs a step of an optimizer, slice by slice.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Steps) -> None:
        self._optimizer = optimizer
        self._steps = steps

    def keeps_places(self, params: Iterable[torch.Tensor]) -> bool:
        """Tries the step with tensors like these parameters, as far as they have gradients.

        Returns:
            Whether the parameters of a slice keep their places in groups; if not, it takes slices
            with only their own parameters to give the bits of the whole step.

        Raises:
            ConfigurationError: a slice updates a parameter differently than the whole step does, or
                the step needs what the tensors of a trial do not have.
            OffloadError: the step changes what no slice may change; see `unsliced_state.py`.
        """
        chosen = list(self._some_of_each(filter(has_gradient, params)))
        if len(chosen) < 2:
            return True
        try:
            if self._is_same_in_places(chosen):
                return True
            differs, is_random = self._compare(chosen)
        except OffloadError:
            raise
        except Exception as error:
            if any(map(_has_graph, chosen)):
                what = "computes with the graphs of gradients (backward with create_graph=True)"
                raise ConfigurationError(refusal(self._optimizer, what)) from error
            logger.warning(
                "%sa trial of the step of %s on small tensors failed (%s: %s), so it is not known "
                "whether it updates each parameter by its own gradient and state alone, as it "
                "has to; compare the losses of some steps with those without offload",
                STATES_PREFIX,
                type(self._optimizer).__name__,
                type(error).__name__,
                str(error),
            )
            return False
        if differs:
            what = (
                "draws random numbers (for stochastic rounding, say), and these would go to other "
                "parameters"
                if is_random
                else "updates a parameter otherwise where there are others (by a norm of all "
                "gradients, say)"
            )
            raise ConfigurationError(refusal(self._optimizer, what))
        return False

    def updates_without_gradients(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether the step changes parameters that have no gradient, or their states.

        Some decay all parameters, or go on with a momentum. Tries it with tensors like these.
        """
        numbers = torch.Generator().manual_seed(0)
        twins = {param: _small(param, numbers) for param in self._some_of_each(params)}
        own = list(twins.values())
        optimizer = _copy_of(self._optimizer, twins)
        try:
            with _seeded({twin.device for twin in own}, 0):
                for param, twin in twins.items():
                    twin.grad = _random(param, numbers)
                self._steps(optimizer, [own], False)
                for twin in own:
                    twin.grad = None
                before = _results_of(own, optimizer)
                self._steps(optimizer, [own], False)
        except Exception:  # it cannot step so, or needs what these tensors do not have
            return False
        return not _are_same(before, _results_of(own, optimizer))

    def _is_same_in_places(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether slices that keep their places in groups give the bits of the whole step."""
        together = self._run(params)
        try:
            in_places = self._run(params, in_slices=True, keeps_places=True)
        except Exception:  # the step needs gradients of all, or makes states of empty parameters
            return False
        return _are_same(in_places, together)

    def _compare(self, params: Sequence[torch.Tensor]) -> tuple[bool, bool]:
        """Whether slices give other bits than the whole step, and whether another seed does."""
        together, sliced = self._run(params), self._run(params, in_slices=True)
        if _are_same(sliced, together):
            return False, False
        if not self._is_repeatable(params, together, sliced):
            logger.warning(
                "%ssteps of %s on the same tensors give other bits each time, so a training with "
                "it has other results each time, with offload or without",
                STATES_PREFIX,
                type(self._optimizer).__name__,
            )
            return False, False
        return True, not _are_same(self._run(params, seed=1), together)

    def _is_repeatable(
        self,
        params: Sequence[torch.Tensor],
        together: Sequence[torch.Tensor],
        sliced: Sequence[torch.Tensor],
    ) -> bool:
        """Whether the same steps give the same bits again, together and in slices.

        A kernel that reads behind the end of a tensor finds the same there now and then.
        """
        return all(
            _are_same(self._run(params), together)
            and _are_same(self._run(params, in_slices=True), sliced)
            for _ in range(_NUM_REPEATS)
        )

    def _some_of_each(self, params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """A few parameters of each kind."""
        settings = {
            param: tuple(
                (key, value) for key, value in group.items() if isinstance(value, bool | str)
            )
            for group in self._optimizer.param_groups
            for param in group["params"]
        }
        left: dict[Any, int] = collections.defaultdict(lambda: _OF_A_KIND)
        num_left = _MOST_TENSORS
        for param in params:
            kind = (param.dim(), param.dtype, settings.get(param))
            if num_left and left[kind] and _can_be_tried(param):
                left[kind] -= 1
                num_left -= 1
                yield param

    def _run(
        self,
        params: Sequence[torch.Tensor],
        *,
        in_slices: bool = False,
        keeps_places: bool = False,
        seed: int = 0,
    ) -> list[torch.Tensor]:
        """The bits of small tensors like these parameters, and of their states, after steps."""
        try:
            return self._run_from({}, params, in_slices, keeps_places, seed)
        except OffloadError:
            raise
        except Exception:  # some optimizers, such as Adagrad, make their states before the step
            states = {param: self._states_like(param) for param in params}
            return self._run_from(states, params, in_slices, keeps_places, seed)

    def _run_from(
        self,
        states: Mapping[torch.Tensor, dict[str, Any]],
        params: Sequence[torch.Tensor],
        in_slices: bool,
        keeps_places: bool,
        seed: int,
    ) -> list[torch.Tensor]:
        numbers = torch.Generator().manual_seed(0)
        twins = {param: _small(param, numbers) for param in params}
        optimizer = _copy_of(self._optimizer, twins)
        optimizer.state.update({twins[p]: copy.deepcopy(own) for p, own in states.items()})
        slices = [[twin] for twin in twins.values()] if in_slices else [list(twins.values())]
        with _seeded({twin.device for twin in twins.values()}, seed):
            for _ in range(_NUM_STEPS):
                slices = slices[::-1]  # as buckets do
                for scale, (param, twin) in enumerate(twins.items(), start=1):
                    _give_gradient(twin, param, scale, numbers)
                self._steps(optimizer, slices, keeps_places)
        return _results_of(twins.values(), optimizer)

    def _states_like(self, param: torch.Tensor) -> dict[str, Any]:
        """Small states like those of a parameter; none if one has another shape than it."""
        found: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(param, {}).items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                found[key] = copy.deepcopy(value)
            elif value.shape == param.shape:
                shape = _cut(local_of(param).shape)
                found[key] = torch.zeros(shape, dtype=value.dtype, device=param.device)
            else:
                return {}
        return found


def has_gradient(param: torch.Tensor) -> bool:
    """Whether it has one, under any of the names."""
    return any(getattr(param, name, None) is not None for name in _GRADIENTS)


def _can_be_tried(param: torch.Tensor) -> bool:
    own = local_of(param)
    return (
        type(own) in (torch.Tensor, torch.nn.Parameter)
        and (own.is_floating_point() or own.is_complex())
        and own.device.type != "meta"
        and own.numel() > 0
    )


def _has_graph(param: torch.Tensor) -> bool:
    return any(getattr(getattr(param, name, None), "requires_grad", False) for name in _GRADIENTS)


def _cut(shape: Sequence[int]) -> list[int]:
    most = _MOST_IN_VECTOR if len(shape) < 2 else _MOST_IN_DIMENSION
    small = [min(size, most) for size in shape]
    while torch.Size(small).numel() > _MOST_NUMBERS:
        small[small.index(max(small))] //= 2
    return small


def _random(like: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    """Random numbers in a small tensor of this one's type, on its device."""
    made = torch.randn(_cut(local_of(like).shape), generator=numbers)
    return made.to(like.device, like.dtype)


def _small(param: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    """A small tensor that an optimizer treats as it treats this parameter."""
    made = _random(param, numbers)
    if isinstance(param, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=param.requires_grad)
    own = vars(param).items()
    marks = {k: v for k, v in own if k[0] != "_" and not isinstance(v, torch.Tensor)}
    vars(made).update(marks)  # attributes that some optimizers read
    return made


def _give_gradient(
    twin: torch.Tensor, param: torch.Tensor, scale: float, numbers: torch.Generator
) -> None:
    for name in _GRADIENTS:
        own = getattr(param, name, None)
        if own is not None:
            setattr(twin, name, scale * _random(param, numbers).to(own.dtype))


def _copy_of(
    optimizer: torch.optim.Optimizer, twins: Mapping[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """The optimizer with small tensors for its parameters, no states, and all else copied."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    memo: dict[int, Any] = {id(optimizer): made}
    memo |= {id(param): twins.get(param, param) for param in params}
    for name, value in vars(optimizer).items():
        if _HOOKS.match(name):  # may be methods of a trainer, with all that it has
            vars(made)[name] = type(value)()
        elif name not in ("param_groups", "state", "step"):
            vars(made)[name] = _copied(value, memo)
    made.param_groups = []
    for group in optimizer.param_groups:
        own = {key: _copied(value, memo) for key, value in group.items() if key != "params"}
        if isinstance(own.get("lr"), float | int):
            own["lr"] = max(own["lr"], _LEAST_LR)
        made.param_groups.append(
            {**own, "params": [twins[param] for param in group["params"] if param in twins]}
        )
    made.state = collections.defaultdict(dict)
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of an attribute of an optimizer; itself if it is large or cannot be copied."""
    if isinstance(value, torch.nn.Module):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a process group
        return value


def _results_of(
    twins: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """The bits of tensors and of their states."""
    return [one for twin in twins for one in _results(twin, optimizer.state.get(twin, {}))]


def _results(twin: torch.Tensor, state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The bits of a tensor and of its states."""
    for one in (twin, *state.values()):
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            yield one.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def _are_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@contextlib.contextmanager
def _seeded(devices: Iterable[torch.device], seed: int) -> Iterator[None]:
    """A context that draws from this seed, and leaves all generators as they were."""
    numpy: Any = sys.modules.get("numpy")
    modules = [(one, torch.get_device_module(one)) for one in devices if one.type != "cpu"]
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        torch.default_generator.manual_seed(seed)
        for device, module in modules:
            stack.callback(module.set_rng_state, module.get_rng_state(device), device)
            seeded = torch.Generator(device).manual_seed(seed).get_state()
            module.set_rng_state(seeded, device)
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(seed)
        yield
