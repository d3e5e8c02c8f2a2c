# SPDX-License-Identifier: Apache-2.0
"""Each door, tried on a sample: `Columns.run`. A column is a method; it gives what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from check.family.cells import Outcome
from check.family.inputs import Batch
from check.family.sample import Sample, in_a_line, loss_of
from check.family.training import (
    Training,
    adamw,
    distance,
    first_difference,
    one_after_the_other,
    same_bits,
    train,
)
from megatron.offload import (
    ChangedInPlaceError,
    LayerMajor,
    OffloadError,
    StorageError,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.errors import InterruptedStepError
from megatron.offload.integration.torch.layers import find_layers

COLUMNS = (
    *("ssd", "replay", "recompute", "parameters", "states", "layer-major", "auto", "chunked loss"),
)
STEPS = 2
AUTO_STEPS = 5  # three that are measured, two with the plan
MICRO_BATCHES = 2
MOST = 1.5  # times the error of the loss in one piece, as tests/unit/test_chunked_loss.py has it
_LEAST_BYTES_PER_S = 250e3  # of the disk that `auto` plans for
_ROUNDING = 2.0**-24  # of fp32
_ROUNDINGS_OF_A_LOSS = 2.0**-21  # one number: its error is a few of them, or none by luck
_SUMS = 1e-5  # of a gradient's largest value, where the same ones are added in another order
_CANCELLED = 1e-7  # of the largest of all
_NO_LAYERS = ("no modules that repeat", "layers that repeat", "no layer", "find no layers")
_FAULTS = (StorageError, ChangedInPlaceError, InterruptedStepError)  # sentences, but no refusals

Result = tuple[Outcome, str, bool | None]


class Warnings(logging.Handler):
    """What the package has said since it was made."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Columns:
    """Trains one sample through each door.

    Args:
        sample: of a family.
        directory: for what moves.
    """

    def __init__(self, sample: Sample, directory: Path) -> None:
        self._sample = sample
        self._directory = directory
        batches = sample.batches(AUTO_STEPS)
        self._steps = [[one] for one in batches]
        self._accumulated = [
            batches[MICRO_BATCHES * n : MICRO_BATCHES * (n + 1)] for n in range(STEPS)
        ]
        self._plain: dict[str, Training] = {}
        self._has_layers = bool(find_layers([sample.pristine]))

    def difference_of_two_plain_trainings(self) -> str:
        """Where a model's training differs from itself; empty: nowhere."""
        again = train(self._sample.model(), self._steps[:STEPS])
        return first_difference(again, self._expected("steps"))

    def run(self, column: str) -> Result:
        """What a column comes to; raises nothing but what ends the process."""
        methods: dict[str, Callable[[], Result]] = {
            "ssd": self._ssd,
            "replay": self._replay,
            "recompute": self._recompute,
            "parameters": self._parameters,
            "states": self._states,
            "layer-major": self._layer_major,
            "auto": self._auto,
            "chunked loss": self._chunked_loss,
        }
        heard = Warnings()
        logger = logging.getLogger("megatron.offload")
        logger.addHandler(heard)
        try:
            outcome, note, moved = methods[column]()
        except OffloadError as error:
            if isinstance(error, _FAULTS):
                return Outcome.CRASH, in_a_line(error), None
            if not self._has_layers and any(words in str(error) for words in _NO_LAYERS):
                return Outcome.NOT_APPLICABLE, str(error), None
            return Outcome.REFUSED, str(error), None
        except Exception as error:
            return Outcome.CRASH, in_a_line(error), None
        finally:
            logger.removeHandler(heard)
        said = " ".join(dict.fromkeys(heard.lines)) if not moved else ""
        return outcome, "; ".join(filter(None, (note, said))), moved

    # -- Columns --------------------------------------------------------------------------------

    def _ssd(self) -> Result:
        found, statistics = self._with_activations(self._steps[:STEPS], replay="off")
        return self._compared(found, "steps", any(one["offloaded_bytes"] for one in statistics))

    def _replay(self) -> Result:
        """More steps than those in which a recipe is compared."""
        found, statistics = self._with_activations(self._steps)
        replayed, moved = (
            sum(one[name] for one in statistics) for name in ("replayed_bytes", "offloaded_bytes")
        )
        outcome, note, _ = self._compared(found, "auto", replayed > 0)
        share = f"{100 * replayed / max(replayed + moved, 1):.0f} % of the bytes are replayed"
        return outcome, note or share, replayed > 0

    def _recompute(self) -> Result:
        if not self._has_layers:
            return Outcome.NOT_APPLICABLE, "no layers that repeat", False
        found, statistics = self._with_activations(self._steps[:STEPS], recompute_layers="all")
        number = min(int(one["recomputed_layers"]) for one in statistics)
        outcome, note, moved = self._compared(found, "steps", number > 0)
        return outcome, note or ("" if moved else "moved instead"), moved

    def _parameters(self) -> Result:
        model = self._sample.model()
        with offload_parameters(model, self._directory) as offload:
            found = train(model, self._steps[:STEPS], shown=offload.expose)
            moved = offload.statistics["read_bytes"] > 0
        return self._compared(found, "steps", moved)

    def _states(self) -> Result:
        model = self._sample.model()
        optimizer = adamw(model)
        with offload_optimizer(
            optimizer, self._directory, bucket_bytes="4KiB", window_bytes=0
        ) as offload:
            found = train(model, self._steps[:STEPS], optimizer=optimizer)
            assert offload.states is not None
            moved = any(tier.statistics.writes.total_bytes for tier in offload.states.tiers)
        state = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}
        for name in ("exp_avg", "exp_avg_sq"):
            found.buffers |= {f"{name} of {n}": one[name] for n, one in state.items()}
        return self._compared(found, "states", moved)

    def _layer_major(self) -> Result:
        if not self._has_layers:
            LayerMajor(self._sample.model())
        model = self._sample.model()
        layer_major = LayerMajor(model)

        def backward(model: torch.nn.Module, batches: Sequence[Batch]) -> list[torch.Tensor]:
            return layer_major.step(batches, lambda batch: loss_of(model, batch))

        found = train(model, self._accumulated, backward=backward, updates=_last_step)
        layer_major.close()
        expected = self._expected("accumulated")
        difference = first_difference(found, expected)
        if not difference:
            return Outcome.IDENTICAL, "", True
        return _order_of_sums(found, expected) or (Outcome.DIFFERENT, difference, True)

    def _auto(self) -> Result:
        """With a disk that takes several times as long as compute, whatever a family saves."""
        began_s = time.perf_counter()
        _, moved_before = self._with_activations(self._steps[:1])
        step_s = time.perf_counter() - began_s
        saved_bytes = moved_before[0]["offloaded_bytes"]
        bytes_per_s = max(_LEAST_BYTES_PER_S, saved_bytes / max(2.0, 4 * step_s))
        found, statistics = self._with_activations(
            self._steps,
            mode="auto",
            max_slowdown="3",
            write_bytes_per_s=bytes_per_s,
            inflight_bytes="64KiB",
        )
        moved = any(one["recomputed_layers"] > 0 for one in statistics)
        outcome, note, _ = self._compared(found, "auto", moved)
        return outcome, note or ("" if moved else "its plan recomputes nothing"), moved

    def _chunked_loss(self) -> Result:
        if self._sample.family.kind != "causal":
            return Outcome.NOT_APPLICABLE, "it is for causal language models", None
        model = self._sample.model()
        with offload_activations(model, mode="off", chunked_loss=8):
            found = train(model, self._steps[:1])
        plain = self._expected("steps")
        exact = self._exact()
        chunked = {"loss": found.losses[0][0], **found.gradients[0]}
        whole = {"loss": plain.losses[0][0], **plain.gradients[0]}
        if chunked.keys() != whole.keys():
            return Outcome.DIFFERENT, "other parameters have gradients", True
        for what in ({"loss"}, whole.keys() - {"loss"}):
            mine, theirs = ({n: one[n] for n in what} for one in (chunked, whole))
            apart = distance(mine, theirs)
            if exact is None:
                is_near, note = apart <= _SUMS, f"{apart:.1e} from the loss in one piece"
            else:
                right = {n: exact[n] for n in what}
                error, allowed = distance(mine, right), distance(theirs, right)
                least = _ROUNDINGS_OF_A_LOSS if what == {"loss"} else _ROUNDING
                is_near = error <= MOST * max(allowed, least) or apart <= _ROUNDING
                note = f"{error:.1e} from fp64, the loss in one piece {allowed:.1e}"
            if not is_near:
                return (
                    Outcome.DIFFERENT,
                    f"{'loss' if what == {'loss'} else 'gradients'} {note}",
                    True,
                )
        return Outcome.IDENTICAL, "within rounding", True

    # -- What they share ------------------------------------------------------------------------

    def _with_activations(
        self, steps: Sequence[Sequence[Batch]], **settings: Any
    ) -> tuple[Training, list[dict[str, int | float]]]:
        model = self._sample.model()
        statistics: list[dict[str, int | float]] = []
        with offload_activations(model, self._directory, min_bytes=1, **settings) as offload:

            def backward(model: torch.nn.Module, batches: Sequence[Batch]) -> list[torch.Tensor]:
                losses = one_after_the_other(model, batches)
                statistics.append(offload.statistics)
                return losses

            return train(model, steps, backward=backward), statistics

    def _compared(self, found: Training, plain: str, moved: bool) -> Result:
        difference = first_difference(found, self._expected(plain))
        outcome = Outcome.DIFFERENT if difference else Outcome.IDENTICAL
        return outcome, difference, moved

    def _expected(self, name: str) -> Training:
        """The plain training that is compared with, run when it is first needed."""
        if name not in self._plain:
            self._plain[name] = self._train_plainly(name)
        return self._plain[name]

    def _train_plainly(self, name: str) -> Training:
        model = self._sample.model()
        if name == "accumulated":
            return train(model, self._accumulated, updates=_last_step)
        optimizer = adamw(model)
        steps = self._steps if name == "auto" else self._steps[:STEPS]
        found = train(model, steps, optimizer=optimizer)
        if name == "states":
            for state in ("exp_avg", "exp_avg_sq"):
                found.buffers |= {
                    f"{state} of {n}": optimizer.state[p][state]
                    for n, p in model.named_parameters()
                    if p in optimizer.state
                }
        return found

    def _exact(self) -> dict[str, torch.Tensor] | None:
        """Loss and gradients in fp64; None: the model cannot compute in it."""
        try:
            found = train(self._sample.model().double(), self._steps[:1])
        except Exception:
            return None
        return {"loss": found.losses[0][0], **found.gradients[0]}


def _last_step(step: int) -> bool:
    """Weights change behind the last step alone: where sums differ, what follows could not be
    compared."""
    return step == STEPS - 1


def _order_of_sums(found: Training, expected: Training) -> Result | None:
    """Where gradients differ by the order in which they are added, and nothing else does."""
    others: set[str] = set()
    for step, gradients in enumerate(expected.gradients):
        mine = found.gradients[step]
        losses = zip(found.losses[step], expected.losses[step], strict=True)
        if mine.keys() != gradients.keys() or not all(same_bits(*both) for both in losses):
            return None
        largest = max((_largest(one) for one in gradients.values()), default=0.0)
        for name, theirs in gradients.items():
            if same_bits(mine[name], theirs):
                continue
            others.add(name)
            # Of one whose terms cancel out, such as a key's bias, only roundings are left.
            allowed = max(_SUMS * _largest(theirs), _CANCELLED * largest)
            if not _largest(mine[name] - theirs) <= allowed:
                return None
    return Outcome.SUMS, f"{len(others)} of {len(expected.gradients[0])} gradients", True


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
