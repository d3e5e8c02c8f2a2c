# SPDX-License-Identifier: Apache-2.0
"""Micro-batches through an NVIDIA DALI pipeline: reading, shuffling, batching, copying to the GPU.

`data.batches` calls `dali_batches` for `--dataloader-type dali`. What is read and in which order
comes from the dataset and from `SampleOrder`, as with the default loader: so the batches are the
same. Imported only then, because DALI is an optional package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline, fn
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from .data import Batch, SampleOrder


class _Source:
    """Reads one sample when DALI asks for it."""

    def __init__(self, dataset: Any, order: SampleOrder, names: list[str]) -> None:
        self._dataset = dataset
        self._order = order
        self._names = names

    def __call__(self, where: Any) -> tuple[np.ndarray, ...]:
        """The fields of one sample; `where` is DALI's SampleInfo."""
        sample = self._dataset[self._order.sample(where.iteration, where.idx_in_batch)]
        return tuple(np.asarray(sample[name]) for name in self._names)


def dali_batches(args: argparse.Namespace, dataset: Any, order: SampleOrder) -> Iterator[Batch]:
    """This rank's micro-batches, for ever; on its GPU where there is one.

    Two of them are prepared ahead: read by this process when the one before is handed out, batched
    and copied by DALI's threads while the training goes on.
    """
    on_gpu = torch.cuda.is_available()
    names = list(dataset[0])
    pipeline = Pipeline(
        batch_size=args.micro_batch_size,
        num_threads=1,
        device_id=torch.cuda.current_device() if on_gpu else None,
        prefetch_queue_depth=2,
    )
    with pipeline:
        fields = fn.external_source(
            source=_Source(dataset, order, names),
            num_outputs=len(names),
            batch=False,
        )
        pipeline.set_outputs(*(field.gpu() if on_gpu else field for field in fields))
    return (batch for (batch,) in DALIGenericIterator(pipeline, names))
