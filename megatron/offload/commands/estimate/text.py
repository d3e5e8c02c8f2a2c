# SPDX-License-Identifier: Apache-2.0
"""What a person reads, and what a program does: `Estimate`, `as_text`, `as_json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from megatron.offload.commands.estimate.hardware import Memory
from megatron.offload.commands.estimate.live_bytes import Kind
from megatron.offload.commands.estimate.saved import MOVE, REPLAY
from megatron.offload.commands.estimate.step import PLAIN, Pass, StepBytes
from megatron.offload.commands.estimate.ways import WAYS, Need, Training
from megatron.offload.sizes import KIB, format_size
from megatron.offload.version import __version__

SCHEMA = "megatron-offload estimate"
FORMAT = 1  # of the JSON


@dataclass(frozen=True)
class Estimate:
    """What was found.

    Attributes:
        name: of the model.
        num_layers: of it.
        asked: the flags.
        training: what of it is no part of the model.
        memory: what it is to fit into; None: any.
        steps: by how activations are treated.
        needs: by way.
        left_out: why a way is not for this model.
    """

    name: str
    num_layers: int
    asked: Mapping[str, Any]
    training: Training
    memory: Memory | None
    steps: Mapping[Pass, StepBytes]
    needs: Mapping[str, Need]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def fits(self, way: str) -> bool:
        """Whether the hardware has room for a way; without hardware it has."""
        return self.memory is None or self.memory.fits(self.needs[way].device)

    @property
    def first_that_fits(self) -> str | None:
        """The first way that the hardware has room for; None: it has for none."""
        return next((way for way in self.needs if self.fits(way)), None)


def as_text(found: Estimate) -> str:
    """Several paragraphs of at most 100 columns, without a newline at the end."""
    paragraphs = [_heading(found), _by_kind(found), _by_way(found), _lines(found)]
    paragraphs.append("\n".join(_hints(found)))
    return "\n\n".join(filter(None, paragraphs))


def _heading(found: Estimate) -> str:
    asked, step = found.asked, found.steps[PLAIN]
    trained = ""
    if asked["lora"] is not None:
        trained = f", {format_size(step.trained)} of them trained (LoRA of rank {asked['lora']})"
    micro_batches = found.training.micro_batches
    times = "" if micro_batches == 1 else f"{micro_batches} micro-batches of "
    gpus = "" if found.training.gpus == 1 else f", divided over {found.training.gpus} GPUs"
    return (
        f"{found.name}: {found.num_layers} layers, {format_size(step.parameters)} of parameters in "
        f"{asked['dtype']}{trained}\n"
        f"{times}{asked['batch']} x {asked['sequence']} tokens, {asked['optimizer']}{gpus}; sizes "
        "are of one GPU"
    )


def _by_kind(found: Estimate) -> str:
    """What there is of each kind, and how little of it each stream leaves in device memory."""
    plain, need = found.steps[PLAIN], found.needs["plain"]
    least = min(found.needs.values(), key=lambda one: one.device)
    rows = []
    for kind, most in _most(found, plain).items():
        at_peak = need.kinds.get(kind, 0.0)
        rows.append([kind.value, *map(_size, (most, at_peak, least.kinds.get(kind, 0.0)))])
    replayed = found.steps.get(Pass(REPLAY))
    total = ["together", "", format_size(need.device), format_size(least.device)]
    heads = ["kind", "most in a step", "at the peak", "at the least"]
    text = _table([*rows, total], heads)
    text += f"\n\nThe peak of plain PyTorch is in the {need.phase}."
    if replayed is not None and plain.kept:
        moved = found.steps[Pass(MOVE)].moved
        text += (
            f"\nOf {format_size(plain.kept)} that autograd saves, replay computes "
            f"{format_size(replayed.replayed)} again; {format_size(moved)} can move."
        )
    return text


def _most(found: Estimate, plain: StepBytes) -> dict[Kind, float]:
    """The most of each kind at any moment, in plain PyTorch."""
    shares = found.training.gpus
    most = {kind: max(float(peak.get(kind, 0.0)) for peak in plain.peaks.values()) for kind in Kind}
    most[Kind.PARAMETERS] = plain.parameters / shares
    most[Kind.GRADIENTS] = plain.trained / shares
    most[Kind.STATES] = found.needs["plain"].kinds[Kind.STATES]
    return most


def _by_way(found: Estimate) -> str:
    is_ssd = found.training.tier == "ssd"
    rows = []
    for number, (way, need) in enumerate(found.needs.items(), 1):
        row = [str(number), WAYS[way].title, *map(_size, (need.device, need.host))]
        row += [_size(need.ssd), _size(need.written)] if is_ssd else [_size(need.written)]
        if found.memory is not None:
            row.append("yes" if found.fits(way) else "no")
        rows.append(row)
    heads = ["", "way", "device peak", "host", *(["SSD"] if is_ssd else []), "written/step"]
    heads += ["fits"] if found.memory is not None else []
    text = _table(rows, heads)
    if found.memory is not None:
        memory = found.memory
        less = f", less {format_size(memory.reserved_bytes)} for its context and fragments"
        text += (
            f"\n\nfits: into {memory.title}, {format_size(memory.device_bytes)}"
            f"{less if memory.reserved_bytes else ''}"
        )
    return text


def _lines(found: Estimate) -> str:
    """The line of Python of each way, by its number."""
    lines = ["from megatron.offload import offload, offload_activations, offload_optimizer"]
    for number, way in enumerate(found.needs, 1):
        if WAYS[way].python:
            lines.append(f"{number:2}  " + _python(way, found).replace("\n", "\n    "))
    return "\n".join(lines)


def _python(way: str, found: Estimate) -> str:
    tier = found.training.tier
    text = WAYS[way].python.replace("TIER", f'"{tier}"')
    if tier == "ssd":
        return text.replace("DIR", '"/mnt/nvme0"')
    return text.replace(", DIR", "")  # what has no directory goes to host memory


def _hints(found: Estimate) -> Iterator[str]:
    memory, first = found.memory, found.first_that_fits
    if memory is None:
        yield "With --hardware it says what fits: a GPU's name, or a JSON file with memory_bytes."
    elif first is None:
        least = min(found.needs.values(), key=lambda one: one.device)
        missing = format_size(least.device - (memory.device_bytes - memory.reserved_bytes))
        yield f"No way fits: the smallest lacks {missing}. Try " + _smaller(found) + "."
    elif first == "plain":
        yield "It fits as it is; nothing needs to move."
    else:
        number = list(found.needs).index(first) + 1
        yield f"The first that fits is way {number}: {WAYS[first].title}."
    yield (
        "What operations take and give back within themselves, and other processes, come on top. "
        "Before\na training starts, megatron-offload doctor checks the machine."
    )


def _smaller(found: Estimate) -> str:
    ideas = [f"a --sequence below {found.asked['sequence']}"]
    ideas += [f"a --batch below {found.asked['batch']}"] if found.asked["batch"] > 1 else []
    ideas += ["--lora 16"] if found.asked["lora"] is None else []
    ideas += ["--dtype bf16"] if found.asked["dtype"] != "bf16" else []
    return ", ".join([*ideas, f"--gpus {2 * found.training.gpus}"])


def _table(rows: list[list[str]], heads: list[str]) -> str:
    return tabulate(rows, heads, tablefmt="plain", disable_numparse=True)


def _size(num_bytes: float) -> str:
    return format_size(num_bytes) if num_bytes >= KIB else "-"


def as_json(found: Estimate) -> str:
    """All figures, in bytes."""
    ways = {}
    for name, need in found.needs.items():
        ways[name] = {
            "title": WAYS[name].title,
            "python": _python(name, found),
            "fits": None if found.memory is None else found.fits(name),
            "device_bytes": round(need.device),
            "host_bytes": round(need.host),
            "ssd_bytes": round(need.ssd),
            "written_bytes": round(need.written),
            "read_bytes": round(need.read),
            "peak_in": need.phase,
            "device_bytes_by_kind": {kind.value: round(of) for kind, of in need.kinds.items()},
        }
    plain = found.steps[PLAIN]
    document = {
        "schema": SCHEMA,
        "format": FORMAT,
        "version": __version__,
        "model": found.name,
        "layers": found.num_layers,
        "settings": {
            name: found.asked[name]
            for name in (
                *("batch", "sequence", "micro_batches", "dtype"),
                *("lora", "lora_targets", "optimizer"),
            )
        }
        | {"gpus": found.training.gpus, "to": found.training.tier},
        "hardware": None
        if found.memory is None
        else {"title": found.memory.title, "device_bytes": found.memory.device_bytes},
        "parameter_bytes": round(plain.parameters),
        "trained_bytes": round(plain.trained),
        "saved_bytes": round(plain.kept),
        "ways": ways,
        "left_out": dict(found.left_out),
    }
    return json.dumps(document, indent=1) + "\n"
