# SPDX-License-Identifier: Apache-2.0
"""The run: checks, set-up, steps, validation, checkpoints. `pretrain` is the one entry point.

Offload enters at four places: its flags (`Requested`), `offload_states` once the optimizer is
there, `install` once a checkpoint was loaded, and `with offload.passes.step()` around forward and
backward.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError, OffloadError
from megatron.offload.integration.megatron import arguments as offload_arguments
from megatron.offload.integration.megatron import cpu_runtime
from megatron.offload.integration.megatron.estimate import stage_of
from megatron.offload.integration.megatron.where_memory_is import where_memory_is
from megatron.offload.integration.megatron.whole_training import OffloadedTraining, Requested
from megatron.offload.stats.memory import PeakMemory

from . import checkpointing, distributed, experts, model, optimizer
from .arguments import check_outputs, parse_arguments
from .checkpointing import Progress, TrainingState
from .corpus import check_corpus
from .data import Batch, batches, build_datasets
from .errors import UserError, fail
from .metrics import Reporter, StepRecord
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def pretrain(task: model.Task, argv: Sequence[str] | None = None) -> None:
    """Trains one model as the command line says.

    What the user can put right ends the process with one sentence and exit code 2.
    """
    args = refusal = None
    try:
        args = parse_arguments(
            f"Pretrain {task.name} on megatron-core.",
            argv,
            (task.add_arguments, offload_arguments.add_offload_arguments),
        )
        requested = Requested.from_args(args)
        requested.check_flags(args)
        task.check_arguments(args)
        settings = task.transformer_config(args)
        reserves = _reserves(args, task, settings)
        requested.check_passes(
            settings,
            # They share the disks: what one of them takes on average.
            reserve_bytes=sum(reserves) // len(reserves),
            num_local_ranks=args.local_world_size,
        )
        check_corpus(args, task)
        checkpointing.check_load(args)
        check_outputs(args)
        tokenizer = task.build_tokenizer(args)
    except (UserError, OffloadError, ValueError) as error:
        if args is None or args.validate_only or args.world_size == 1:
            fail(str(error))
        refusal = str(error)  # perhaps this machine's alone
    if args.validate_only:
        return
    distributed.initialize_logging(args)
    cpu_runtime.activate()
    device = distributed.initialize_distributed(args)
    refusals = [message for message in distributed.of_all(refusal) if message is not None]
    if refusals:
        distributed.shutdown()  # all know it and leave: none may miss another's connections
        fail(refusals[0])
    run = _Run(args, task, tokenizer, device)
    try:
        run.start(settings, requested, reserves[args.local_rank])
    except (UserError, OffloadError, ValueError) as error:
        fail(str(error))
    try:
        run.train()
    except ConfigurationError as error:  # found by measuring: no plan keeps to the budget
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    distributed.shutdown()


def _reserves(args: argparse.Namespace, task: model.Task, settings: TransformerConfig) -> list[int]:
    """Bytes of activations on each rank of this machine."""
    first = args.rank - args.local_rank
    ranks = range(first, min(first + args.local_world_size, args.world_size))
    stages = [stage_of(rank, args.world_size, settings) for rank in ranks]
    return [task.activation_bytes(args, settings, stage) for stage in stages]


class _Run:
    """One training run on one rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        task: model.Task,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        self.args = args
        self.task = task
        self.tokenizer = tokenizer
        self.device = device
        self.progress = Progress()
        self.peak = PeakMemory(open_device(device))
        self.forward_backward = get_forward_backward_func(
            pp_size=args.pipeline_model_parallel_size,
            vp_size=args.virtual_pipeline_model_parallel_size,
        )

    # -------------------------------------------------------------- set-up

    def start(self, settings: TransformerConfig, requested: Requested, reserve_bytes: int) -> None:
        """Builds everything, reads the checkpoint and installs offload.

        Raises:
            UserError, OffloadError, ValueError: What the user can put right.
        """
        args = self.args
        self.train_data, self.valid_data = build_datasets(args, self.task, self.tokenizer)
        vocab_size = self.tokenizer.padded_vocab_size(
            args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        )
        self.chunks = model.build_model_chunks(args, settings, self.task, vocab_size)
        if args.save is not None:
            checkpointing.check_buckets(self.chunks)
        self.optimizer = optimizer.build_optimizer(args, self.chunks)
        self.scheduler = optimizer.build_scheduler(args, self.optimizer)
        metrics_file = args.metrics_file
        self.offload = OffloadedTraining(requested, metrics_file and metrics_file.parent)
        self.offload.offload_states(self.optimizer)
        if args.load is not None:
            self.progress = checkpointing.load_checkpoint(args.load, self._state())
        self.offload.install(
            self.chunks,
            self.optimizer,
            reserve_bytes=reserve_bytes,
            num_local_ranks=args.local_world_size,
        )
        if requested.moves:
            table = where_memory_is(
                requested.activations,
                self.chunks,
                self.optimizer,
                self.offload.states,
                activation_bytes=reserve_bytes,
            )
            _log.info("%s", table)
        _log.info(
            "%s: %.1f M parameters on rank 0, tensor %d x pipeline %d x data %d, %s, %d thread(s)",
            self.task.name,
            model.num_parameters(self.chunks) / 1e6,
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.data_parallel_size,
            "bf16" if args.bf16 else "fp32",
            args.cpu_threads,
        )

    def _state(self) -> TrainingState:
        return TrainingState(
            self.args, self.task, self.chunks, self.optimizer, self.scheduler, self.offload.states
        )

    def _streams(self, dataset: Any, consumed_samples: int) -> Any:
        """What the schedule reads from: one stream, or one per virtual stage."""
        streams: list[Iterator[Batch]] = batches(
            self.args, dataset, consumed_samples, len(self.chunks)
        )
        return streams if len(streams) > 1 else streams[0]

    # -------------------------------------------------------------- the loop

    def train(self) -> None:
        """Trains to --train-iters, or to a multiple of --exit-interval.

        Raises:
            KeyboardInterrupt: Somebody has ended it; the summary has the steps until then.
        """
        args, progress = self.args, self.progress
        reporter = Reporter(args, progress.iteration) if args.rank == 0 else None
        try:
            self._train(reporter)
        except KeyboardInterrupt:
            if reporter is not None:
                reporter.close()
            raise

    def _train(self, reporter: Reporter | None) -> None:
        args, progress = self.args, self.progress
        streams = self._streams(self.train_data, progress.consumed_samples)
        for chunk in self.chunks:
            chunk.train()
        saved_at = progress.iteration
        done = progress.iteration >= args.train_iters
        if done:
            _log.info("nothing to do: --train-iters %d is reached", args.train_iters)
        while not done:
            if args.wait_for_input and not sys.stdin.readline():
                break  # nobody will say any more
            record = self._step(streams)
            step = progress.iteration
            done = step == args.train_iters or step % (args.exit_interval or step + 1) == 0
            if done:
                self._synchronize_parameters()
                self.offload.parameters.expose()
                record.model = model.weights_digest(self.chunks)
            if reporter is not None:
                reporter.report_step(record)
            if args.eval_iters and (step % args.eval_interval == 0 or done):
                loss = self._validate()
                if reporter is not None and loss is not None:
                    reporter.report_validation(step, loss)
            if args.save is not None and args.save_interval and step % args.save_interval == 0:
                self._save()
                saved_at = step
        if args.save is not None and saved_at != progress.iteration:
            self._save()
        summary = self.offload.summary()
        self.offload.close()  # what is to be kept is in the checkpoint
        if reporter is not None:
            reporter.close(summary)

    def _step(self, streams: Any) -> StepRecord:
        """One step: forward and backward of all micro-batches, optimizer, schedule."""
        args = self.args
        learning_rate = optimizer.learning_rate(self.optimizer)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.peak.begin_step()
        begin = time.perf_counter()
        with self.offload.passes.step():
            loss_sums = self._forward_backward(streams, forward_only=False)
        peak_bytes = self.peak.end_step()
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=args.global_batch_size)
        losses = {**self._share(loss_sums), **experts.take_balance_loss(args)}
        step_time_s = time.perf_counter() - begin
        device_bytes = self.peak.device_bytes()
        self.offload.passes.pause()
        self.progress.iteration += 1
        self.progress.consumed_samples += args.global_batch_size
        return StepRecord(
            step=self.progress.iteration,
            loss=losses.pop("loss"),
            losses=losses,
            grad_norm=float(grad_norm),
            step_time_s=step_time_s,
            tokens_per_s=args.global_batch_size * self.task.tokens_per_sample(args) / step_time_s,
            peak_activation_bytes=distributed.largest(peak_bytes, self.device),
            peak_activation_bytes_rank0=peak_bytes,
            peak_device_bytes=distributed.largest(device_bytes, self.device),
            learning_rate=learning_rate,
            offload=dict(self.offload.passes.statistics),
            states=self.offload.states.statistics,
            parameters=self.offload.parameters.statistics,
        )

    def _forward_backward(self, streams: Any, forward_only: bool) -> torch.Tensor | None:
        """Runs the pipeline schedule.

        Returns:
            Sums over the micro-batches, one per name of a loss; None except on the last stage.
        """
        reports = self.forward_backward(
            forward_step_func=self.task.forward_step,
            data_iterator=streams,
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.args.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        names = self.task.loss_names(self.args)
        losses = [torch.stack([report[name] for name in names]) for report in reports]
        return torch.stack(losses).sum(dim=0) if losses else None

    def _share(self, loss_sums: torch.Tensor | None) -> dict[str, float]:
        """Means over the global batch, by name, on every rank."""
        names = self.task.loss_names(self.args)
        means = distributed.share_losses(
            loss_sums, len(names), self.args.num_microbatches, self.device
        )
        return dict(zip(names, means, strict=True))

    # -------------------------------------------------------------- between steps

    def _validate(self) -> float | None:
        """Mean loss over --eval-iters batches, always the same; None without validation data."""
        if self.valid_data is None:
            return None
        self._synchronize_parameters()
        streams = self._streams(self.valid_data, consumed_samples=0)
        for chunk in self.chunks:
            chunk.eval()
        total = 0.0
        with torch.no_grad():
            for _ in range(self.args.eval_iters):
                loss_sums = self._forward_backward(streams, forward_only=True)
                total += self._share(loss_sums)["loss"]
        for chunk in self.chunks:
            chunk.train()
        return total / self.args.eval_iters

    def _save(self) -> None:
        self._synchronize_parameters()
        saved = checkpointing.save_checkpoint(self.args.save, self.progress, self._state())
        self.offload.states.note_checkpoint(saved)

    def _synchronize_parameters(self) -> None:
        """Ends an overlapped gathering of parameters that the next forward would have ended."""
        if self.args.overlap_param_gather:
            for chunk in self.chunks:
                assert isinstance(chunk, DistributedDataParallel)
                chunk.disable_forward_pre_hook()
                chunk.enable_forward_pre_hook()
