# SPDX-License-Identifier: Apache-2.0
"""From per-token losses to the number that is minimised; the forward steps bind the masks."""

from __future__ import annotations

import torch


def masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of per-token losses [b, s] where the mask is 1, in fp32."""
    weights = mask.reshape(-1)
    return (losses.float().reshape(-1) * weights).sum() / weights.sum().clamp(min=1)


def report(**losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies for the report: the schedules divide the loss in place."""
    return {name: loss.detach().clone() for name, loss in losses.items()}


def language_model_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the tokens to be predicted."""
    loss = masked_mean(output, loss_mask)
    return loss, report(loss=loss)
