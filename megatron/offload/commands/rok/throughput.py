# SPDX-License-Identifier: Apache-2.0
"""Operations of a model whose flags are known: `flops_per_token`, for an axis of the picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.offload.commands.launch_command import LaunchCommand
from megatron.offload.commands.plan.arguments import add_model, add_parallelism
from megatron.offload.commands.plan.request import model_of
from megatron.offload.errors import ConfigurationError

_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")


def flops_per_token(flags: Sequence[str]) -> float | None:
    """Operations of forward and backward for a token, as `Transformer.flops_per_token` counts them.

    Args:
        flags: of a training script, named as Megatron's.

    Returns:
        None: the flags do not say how large the model is.
    """
    given = {flag.partition("=")[0] for flag in flags}
    if not given.issuperset(_NEEDED):
        return None
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_model(parser)
    add_parallelism(parser)
    args = argparse.Namespace()
    try:
        LaunchCommand((), None, tuple(flags)).read(parser, args)
        return model_of(args).flops_per_token
    except ConfigurationError:  # another kind of model
        return None
