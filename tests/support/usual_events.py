# SPDX-License-Identifier: Apache-2.0
"""What training loops do, as events of `random_trainings.py`: passes, steps, checkpoints."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel

from tests.support.random_trainings import Events, Run

Tensor = torch.Tensor
EVENTS = Events()


@EVENTS.event(12)
def train(run: Run, a: int, b: int) -> None:
    num = a % 3 + 1
    if run.program.first.layer_major:  # the same, one after the other
        batches = [run.batch() for _ in range(num)]
        if run.layer_major is not None:
            losses = run.layer_major.step(batches, run.net)
        else:
            losses = []
            for batch in batches:
                losses.append(run.net(batch))
                losses[-1].backward()
        run.show("losses", [loss.detach() for loss in losses])
    else:
        for _ in range(num):
            run.loss().backward()
    away = run.program.moves_gradients
    if b >= 5:
        run.show("norm", clip_grad_norm_(run.net.parameters(), 0.1, foreach=b == 6))
    elif b == 4 and away:
        for handle in run.handles:
            parameters = getattr(handle, "parameters", handle)
            if hasattr(parameters, "bring_gradients"):
                parameters.bring_gradients()
        run.show("gradients", [p.grad for p in run.net.parameters() if p.grad is not None])
    run.step()
    run.optimizer.zero_grad(set_to_none=away or b % 2 == 0)


@EVENTS.event(6)
def accumulate(run: Run, a: int, b: int) -> None:
    for _ in range(a % 2 + 1):
        run.loss().backward()


@EVENTS.event(5)
def step(run: Run, a: int, b: int) -> None:
    run.step()


@EVENTS.event(4)
def zero_grad(run: Run, a: int, b: int) -> None:
    (run.optimizer if a % 2 else run.net).zero_grad(set_to_none=b % 2 == 0)


@EVENTS.event(3)
def two_forwards(run: Run, a: int, b: int) -> None:
    losses = [run.loss(), run.loss()]
    if a % 3 == 0:
        sum(losses).backward()
    else:
        for loss in losses if a % 3 == 1 else reversed(losses):
            loss.backward()


@EVENTS.event()
def one_forward_is_dropped(run: Run, a: int, b: int) -> None:
    first = run.loss()
    if b % 2:
        del first
    run.loss().backward()


@EVENTS.event()
def retained(run: Run, a: int, b: int) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    if b % 2:
        run.show("inner", torch.autograd.grad(loss, run.trained()[-1], retain_graph=True))
    loss.backward()


@EVENTS.event()
def penalty(run: Run, a: int, b: int) -> None:
    """Double backward: the norm of gradients is part of the loss."""
    loss = run.loss()
    params = run.trained()
    found = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    loss = loss + sum(one.square().sum().real for one in found if one is not None)
    loss.backward()


@EVENTS.event()
def autograd_grad(run: Run, a: int, b: int) -> None:
    run.show("found", torch.autograd.grad(run.loss(), run.trained(), allow_unused=True))


@EVENTS.event()
def weight_penalty(run: Run, a: int, b: int) -> None:
    weights = [p for name, p in run.net.named_parameters() if p.requires_grad and "pos" not in name]
    penalty = sum(p.abs().square().sum() for p in weights) if b % 2 else 0
    loss = run.loss()
    if not b % 2:
        penalty = sum(p.abs().flatten()[::2].sum() for p in weights)
    (loss + 0.01 * penalty).backward()


@EVENTS.event(4)
def evaluate(run: Run, a: int, b: int) -> None:
    run.net.eval()
    with torch.inference_mode() if a % 3 == 0 else torch.no_grad():
        if run.program.first.layer_major and b % 2:
            batches = [run.batch() for _ in range(3)]
            if run.layer_major is None:
                found = [run.net(batch) for batch in batches]
            else:
                found = run.layer_major.evaluate(batches, lambda model, batch: model(batch))
            run.show("losses", found)
        else:
            run.loss()
    run.net.train(run.is_training)


@EVENTS.event()
def toggle_training(run: Run, a: int, b: int) -> None:
    run.is_training = not run.is_training
    for model in run.models:
        model.train(run.is_training)


@EVENTS.event(3)
def autocast(run: Run, a: int, b: int) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=b % 3 != 0):
        for _ in range(a % 2 + 1):
            run.loss().backward()
        if b % 4 == 1:
            with torch.no_grad():
                run.loss()


@EVENTS.event(3)
def scaled(run: Run, a: int, b: int) -> None:
    run.scaler.scale(run.loss() * (float("inf") if a == 7 else 1)).backward()
    if b % 2:
        run.scaler.unscale_(run.optimizer)
        run.show("norm", clip_grad_norm_(run.net.parameters(), 0.5))
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.show("scale", run.scaler.get_scale())
    run.optimizer.zero_grad()


@EVENTS.event(4)
def clip(run: Run, a: int, b: int) -> None:
    if a % 4 == 0:
        clip_grad_value_(run.net.parameters(), 0.01)
    else:
        norm = clip_grad_norm_(run.net.parameters(), 0.1, foreach=(None, True, False)[a % 3])
        run.show("norm", norm)


@EVENTS.event()
def schedule(run: Run, a: int, b: int) -> None:
    if a % 2 and not isinstance(run.optimizer, torch.optim.LBFGS):
        if run.scheduler is None and "betas" in run.optimizer.defaults:
            run.scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, 1000)
        elif run.scheduler is None:
            run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 0.9**n)
        if len(run.scheduler.base_lrs if b % 2 else run.optimizer.param_groups) == len(
            run.optimizer.param_groups
        ):
            run.scheduler.step()
        return
    for group in run.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.9)
        else:
            group["lr"] *= 0.9
        if b % 2 and "weight_decay" in group:
            group["weight_decay"] = 0.01


@EVENTS.event()
def add_group(run: Run, a: int, b: int) -> None:
    """A layer is added, and its parameters to the optimizer."""
    if run.added < 2 and not isinstance(run.optimizer, torch.optim.LBFGS):
        run.added += 1
        block = run.new_block(a)
        run.net.blocks.append(block)
        run.optimizer.add_param_group({"params": list(block.parameters())})


@EVENTS.event()
def replace_layer(run: Run, a: int, b: int) -> None:
    """A layer is replaced by another one, a copy or a new one; the optimizer keeps the old one."""
    new = copy.deepcopy(run.block(a)) if b % 2 else run.new_block(0)
    run.net.blocks[a % len(run.net.blocks)] = new


@EVENTS.event()
def reorder(run: Run, a: int, b: int) -> None:
    """Layers run in another order, or one of them no more."""
    blocks = list(run.net.blocks)
    if b % 3 == 0 and len(blocks) > 2:
        del blocks[a % len(blocks)]
    else:
        blocks.append(blocks.pop(a % len(blocks)))
    run.net.blocks = nn.ModuleList(blocks)


@EVENTS.event(4)
def freeze(run: Run, a: int, b: int) -> None:
    for param in run.block(a).parameters():
        param.requires_grad_(not param.requires_grad and param.dtype is not torch.long)


@EVENTS.event(3)
def write(run: Run, a: int, b: int) -> None:
    """A parameter gets other values."""
    param = run.param(a, b)
    with torch.no_grad():
        if b % 6 == 0:
            param.data = torch.full_like(param, 0.1)
        elif b % 6 == 1:
            param.normal_()
        elif b % 6 == 2:
            param.data.mul_(0.5)
        elif b % 6 == 3:
            param.copy_(torch.randn_like(param))
        elif b % 6 == 4:
            flat = torch.nn.utils.parameters_to_vector(run.block(a).parameters())
            torch.nn.utils.vector_to_parameters(flat * 0.9, run.block(a).parameters())
        else:
            param.flatten()[:2].zero_()
            param.data[..., :1] = 0.3


@EVENTS.event(3)
def average(run: Run, a: int, b: int) -> None:
    """An average of weights is taken, and swapped in for an evaluation."""
    with torch.no_grad():
        own = {name: one.clone() for name, one in run.net.named_parameters()}
        for name, one in own.items():
            before = run.average.get(name, one)
            run.average[name] = before.lerp(one, 0.5) if one.is_floating_point() else one
        if b % 2:
            for name, one in run.net.named_parameters():
                if a % 2:
                    one.copy_(run.average[name])
                else:
                    one.data = run.average[name].clone()
            run.loss()
            for name, one in run.net.named_parameters():
                one.data.copy_(own[name])


@EVENTS.event(3)
def copied(run: Run, a: int, b: int) -> None:
    """A copy of the model takes a step of its own."""
    if a % 4 < 2 or run.hooks or "spectral_norm" in run.program.kinds:
        other = copy.deepcopy(run.net)
    else:
        other = AveragedModel(run.net).module
    run.show("copy", dict(other.named_parameters()))
    if a % 2:
        other(run.batch()).backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        run.show("copy's step", dict(other.named_parameters()))
    if b % 3 == 1:
        other = copy.deepcopy(run.optimizer)
        run.show("copied states", other.state_dict())
    elif b % 3 == 2 and not isinstance(run.optimizer, torch.optim.LBFGS) and not run.scheduler:
        other, optimizer = copy.deepcopy((run.net, run.optimizer))
        other(run.batch()).backward()
        optimizer.step()
        run.show("both", (dict(other.named_parameters()), optimizer.state_dict()))


@EVENTS.event(3)
def save(run: Run, a: int, b: int) -> None:
    found = {"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}
    if a % 2:
        buffer = io.BytesIO()
        torch.save(found, buffer)
        buffer.seek(0)
        run.checkpoint = torch.load(buffer, weights_only=bool(b % 2))
    else:
        run.checkpoint = copy.deepcopy(found)
    run.checkpoint["blocks"] = [id(one) for one in run.net.blocks]
    run.show("saved", {k: run.checkpoint[k] for k in ("model", "optimizer")})


@EVENTS.event(3)
def load(run: Run, a: int, b: int) -> None:
    if not run.checkpoint or run.checkpoint["blocks"] != [id(one) for one in run.net.blocks]:
        return
    if a % 3 != 1:
        run.net.load_state_dict(run.checkpoint["model"], assign=b % 4 == 3 and a % 3 == 0)
    if a % 3 != 2:
        run.optimizer.load_state_dict(copy.deepcopy(run.checkpoint["optimizer"]))


@EVENTS.event()
def new_training(run: Run, a: int, b: int) -> None:
    """Another model and optimizer go on from what is saved of these."""
    if run.added or run.hooks:
        return
    found = {"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}
    found = copy.deepcopy(found)
    run.close()
    other = run.new_models()
    if {*other[0].state_dict()} == {*found["model"]}:
        run.models = other
        run.optimizers = [run.new_optimizer(model) for model in run.models]
        run.checkpoint = {}
        run.scheduler = None
        run.average = {}
        for model in run.models:
            model.train(run.is_training)
    if a % 2:
        run.open()
    run.net.load_state_dict(found["model"])
    run.optimizer.load_state_dict(found["optimizer"])
    if not a % 2:
        run.open()


@EVENTS.event()
def change_shape(run: Run, a: int, b: int) -> None:
    run.shape = (a % 3 + 1, b % 7 + 2)


@EVENTS.event(3)
def reopen(run: Run, a: int, b: int) -> None:
    run.close()
    if b % 2:
        run.show_all()
    run.open_of = run.program.then if run.open_of is run.program.first else run.program.first
    run.open()


@EVENTS.event(3)
def adversaries(run: Run, a: int, b: int) -> None:
    """The critic takes a step on hidden states, the net one through the critic."""
    if len(run.models) < 2:
        return
    critic, optimizer = run.models[1], run.optimizers[1]
    hidden = run.net(run.batch(), hidden_only=True)
    (critic(hidden.detach()).mean() + critic(torch.randn_like(hidden)).square().mean()).backward()
    if isinstance(optimizer, torch.optim.LBFGS):
        return
    optimizer.step()
    optimizer.zero_grad()
    if b % 2:
        for param in critic.parameters():
            param.requires_grad_(False)
    loss = critic(hidden if a % 2 else run.net(run.batch(), hidden_only=True)).mean()
    run.show("adversary", loss)
    if loss.requires_grad:
        loss.backward()
    for param in critic.parameters():
        param.requires_grad_(param.dtype is not torch.long)


@EVENTS.event(4)
def look(run: Run, a: int, b: int) -> None:
    run.show_all()
