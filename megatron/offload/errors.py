# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as types. Raised by every room, caught by integrations and by users.

A message is one sentence: `activation offload: <what happened>; <what was expected>; <what to do>`,
and begins with `optimizer states:`, `parameters:`, `gradients:`, `frozen features:` or
`layer-major steps:` where it is about these.
"""

from __future__ import annotations

from typing import Any

PREFIX = "activation offload: "
STATES_PREFIX = "optimizer states: "
STEPS_PREFIX = "layer-major steps: "
PARAMETERS_PREFIX = "parameters: "
GRADIENTS_PREFIX = "gradients: "
FEATURES_PREFIX = "frozen features: "
_PREFIXES = (
    PREFIX,
    STATES_PREFIX,
    STEPS_PREFIX,
    PARAMETERS_PREFIX,
    GRADIENTS_PREFIX,
    FEATURES_PREFIX,
)


class OffloadError(RuntimeError):
    """Offload cannot go on, and going on silently would give wrong results."""

    def __init__(self, message: str) -> None:
        is_whole = message.startswith(_PREFIXES)
        super().__init__(message if is_whole else PREFIX + message)


class ConfigurationError(OffloadError, ValueError):
    """The flags, the directory or the installed versions cannot work; found before training."""


class InfeasibleBudgetError(ConfigurationError):
    """No plan needs as little memory, or as little time, as was asked for.

    Attributes:
        smallest_bytes: the smallest memory budget that can be met.
        step_s: seconds of a step with it.
        plan: a `Plan` that does.
    """

    def __init__(self, message: str, smallest_bytes: int, step_s: float, plan: Any) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.step_s = step_s
        self.plan = plan


class StorageError(OffloadError):
    """Saved bytes could not be read back."""


class LostStateError(StorageError):
    """Model states, parameters or gradients could not be read back from their only copy."""


class InterruptedStepError(OffloadError):
    """An optimizer's step ended in its middle, so what it has left is no state to go on from."""


class ChangedInPlaceError(OffloadError):
    """A saved activation was modified in place between its save and its use in backward."""
