# SPDX-License-Identifier: Apache-2.0
"""What few training loops do, as events of `random_trainings.py`: errors, hooks, transforms."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.support.random_models import HIDDEN
from tests.support.random_trainings import Events, Injected, Interrupted, Run

Tensor = torch.Tensor
EVENTS = Events()


def _fail(b: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise Interrupted if b >= 4 else Injected

    return fail


@EVENTS.event()
def raise_in_forward(run: Run, a: int, b: int) -> None:
    block = run.block(a)
    hook = (block if b % 2 else block.norm).register_forward_hook(_fail(b))
    try:
        run.loss().backward()
    finally:
        hook.remove()


@EVENTS.event()
def raise_in_backward(run: Run, a: int, b: int) -> None:
    def put(_: nn.Module, __: Any, result: Tensor) -> None:
        if result.requires_grad:
            result.register_hook(_fail(b))

    hook = run.block(a).register_forward_hook(put)
    try:
        loss = run.loss()
    finally:
        hook.remove()
    try:
        loss.backward()
    finally:
        if b % 2:
            run.optimizer.zero_grad()


@EVENTS.event()
def raise_around_step(run: Run, a: int, b: int) -> None:
    if a % 3 == 0:
        run.optimizer.step(_fail(b))
    hook = (
        run.optimizer.register_step_pre_hook(_fail(b))
        if a % 3 == 1
        else run.optimizer.register_step_post_hook(_fail(b))
    )
    try:
        run.step()
    finally:
        hook.remove()


@EVENTS.event()
def raise_in_step(run: Run, a: int, b: int) -> None:
    """A step ends in its middle, and the training goes on from before."""
    model = copy.deepcopy(run.net.state_dict())
    states = copy.deepcopy(run.optimizer.state_dict())
    run.loss().backward()
    param = run.param(a, b)
    grad = param.grad
    if grad is None:
        return
    try:
        param.grad = grad.to_sparse()
        run.step()
    finally:
        run.optimizer.zero_grad()
        run.net.load_state_dict(model)
        run.optimizer.load_state_dict(states)


@EVENTS.event(1)
def convert(run: Run, a: int, b: int) -> None:
    """Weights are rounded."""
    run.net.to(torch.bfloat16).to(torch.float32)


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


@EVENTS.event(3)
def hook(run: Run, a: int, b: int) -> None:
    """A hook is put somewhere, or all are taken off."""
    if len(run.hooks) > 2:
        while run.hooks:
            run.hooks.pop().remove()
        return
    block, param = run.block(a), run.param(a, b)

    def say(what: str, *_: Any) -> None:
        run.called.append(what)

    if b % 7 == 0:
        own = block.register_forward_hook(lambda _, __, result: result * 0.9)
    elif b % 7 == 1:
        own = block.register_full_backward_hook(functools.partial(say, f"backward {a}"))
    elif b % 7 == 2 and param.requires_grad:
        own = param.register_hook(lambda grad: grad * 0.5)
    elif b % 7 == 3 and param.requires_grad:
        own = param.register_post_accumulate_grad_hook(_halve)
    elif b % 7 == 4:
        own = block.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
    elif b % 7 == 5:
        own = block.body.register_full_backward_pre_hook(functools.partial(say, f"pre {a}"))
    else:
        own = run.optimizer.register_step_post_hook(functools.partial(say, "step"))
    run.hooks.append(own)


@EVENTS.event()
def functional_call(run: Run, a: int, b: int) -> None:
    own = {
        name: (p.detach() * 1.01).to(p.dtype).requires_grad_()
        for name, p in run.net.named_parameters()
        if p.requires_grad
    }
    if b % 2:  # some of them
        own = dict(list(own.items())[a::2])
    loss = torch.func.functional_call(run.net, own, (run.batch(),))
    run.show("loss", loss)
    if loss.requires_grad:
        run.show("found", torch.autograd.grad(loss, list(own.values()), allow_unused=True))


@EVENTS.event()
def pruned(run: Run, a: int, b: int) -> None:
    """Half of a weight is zero from here on, or for one pass."""
    linear = [one for one in run.block(a).modules() if type(one) is nn.Linear]
    if not linear or nn.utils.parametrize.is_parametrized(linear[0]):
        return
    prune.l1_unstructured(linear[0], "weight", amount=0.5)
    try:
        run.loss().backward()
    finally:
        prune.remove(linear[0], "weight")


@EVENTS.event()
def cached_parametrizations(run: Run, a: int, b: int) -> None:
    with nn.utils.parametrize.cached():
        run.loss().backward()
        if b % 2:
            run.loss().backward()


@EVENTS.event()
def change_gradients(run: Run, a: int, b: int) -> None:
    param = run.param(a, b)
    if b % 3 == 0:
        param.grad = None
    elif b % 3 == 1 and param.grad is not None:
        param.grad.add_(0.1)
    elif a % 2:  # views of one buffer, as DistributedDataParallel has them
        params = run.trained()
        whole = torch.zeros(sum(one.numel() for one in params), dtype=params[0].dtype)
        for one, part in zip(params, whole.split([one.numel() for one in params]), strict=True):
            if one.dtype is whole.dtype:
                one.grad = part.view(one.shape)
    elif param.requires_grad:
        param.grad = torch.full_like(param, 0.01)


@EVENTS.event()
def other_step(run: Run, a: int, b: int) -> None:
    """An optimizer that offload was not told of takes a step."""
    run.loss().backward()
    other = torch.optim.SGD(run.trained(), lr=0.01, momentum=0.5, foreach=b % 2 == 0)
    for _ in range(a % 2 + 1):
        other.step()


@EVENTS.event()
def swapped(run: Run, a: int, b: int) -> None:
    param = run.param(a, b)
    new = nn.Parameter(torch.full_like(param, 0.2), param.requires_grad)
    torch.utils.swap_tensors(param, new)


@EVENTS.event()
def change_states(run: Run, a: int, b: int) -> None:
    """States are changed, replaced or taken away."""
    shown = run.optimizer.state_dict()["state"]
    for number in list(shown)[a % 2 :: 2]:
        for value in shown[number].values():
            if isinstance(value, Tensor) and value.dim():
                value.mul_(0.5)
    if b % 3 == 1:
        run.optimizer.state.clear()
    elif b % 3 == 2:
        for state in list(run.optimizer.state.values())[a % 2 :: 2]:
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = torch.zeros_like(value)


@EVENTS.event()
def rebuild_groups(run: Run, a: int, b: int) -> None:
    """The optimizer gets the parameters that the model has now."""
    if isinstance(run.optimizer, torch.optim.LBFGS):
        return
    params = list(run.net.parameters())
    groups = run.optimizer.param_groups
    for number, group in enumerate(groups):
        group["params"] = params[number :: len(groups)]
    for param in set(run.optimizer.state) - set(params) if b % 2 else ():
        del run.optimizer.state[param]


@EVENTS.event()
def wrapped(run: Run, a: int, b: int) -> None:
    """Others have the say what is saved, or where backward runs."""
    if a % 4 == 0:
        loss = checkpoint(run.net, run.batch(), use_reentrant=False)
    elif a % 4 == 1:
        with torch.autograd.graph.save_on_cpu():
            loss = run.loss()
    else:
        loss = run.loss()
    if b % 3 == 0:
        loss.backward(inputs=run.trained()[b::3])
    elif b == 7:
        with torch.autograd.detect_anomaly(check_nan=False):
            loss.backward()
    elif b % 3 == 1:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()


@EVENTS.event()
def hidden(run: Run, a: int, b: int) -> None:
    """What layers hand on is kept, with its gradient; or a layer is called by itself."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, result: Tensor) -> None:
        if result.requires_grad:
            result.retain_grad()
            kept.append(result)

    own = run.block(a).register_forward_hook(keep)
    try:
        if b % 2:
            loss = run.loss()
        else:
            x = torch.randn(2, 5, HIDDEN, requires_grad=True)
            loss = run.block(a)(x).square().mean()
    finally:
        own.remove()
    if b % 3 == 0 and kept:
        loss = loss + kept[0].square().mean()
    if loss.requires_grad:
        loss.backward()
    run.show("hidden", [(one, one.grad) for one in kept])


@EVENTS.event(1)
def transformed(run: Run, a: int, b: int) -> None:
    own = {name: p for name, p in run.net.named_parameters() if p.requires_grad}
    params = {name: p.detach().clone() for name, p in own.items()}
    batch = run.batch()

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(run.net, params, (batch,))

    if b % 2:
        run.show("found", torch.func.grad(loss_of)(params))
    else:
        tangents = {name: torch.ones_like(one) for name, one in params.items()}
        run.show("found", torch.func.jvp(loss_of, (params,), (tangents,)))
