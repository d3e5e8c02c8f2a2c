# SPDX-License-Identifier: Apache-2.0
"""Errors in GPUDirect, in several tiers used as one, and in opening them."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

GDS = "unit/test_gds.py::"
GDS_MARKS = "unit/test_gds_events.py::"
TIERED = "unit/test_tiered.py::"

# -- tiers/gds.py --------------------------------------------------------------------------------
gds = table_of("tiers/gds.py", MUTATIONS)

gds(
    "kvikio does not wait for the memory's former user",
    """
    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[DeviceMemory, None, None]:
        self._device.wait_for_event(self._event)
""",
    """
    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[DeviceMemory, None, None]:
""",
    GDS_MARKS + "test_the_mark_of_a_read_is_set_after_its_memory_is_taken",
)
gds(
    "kvikio does not wait for the producer",
    """
        self._device.wait_for_event(self._event)
        self.check()
""",
    """
        self.check()
""",
    GDS_MARKS + "test_a_write_waits_for_its_mark_before_the_drive_gets_the_memory",
)
gds(
    "a transfer does not keep its memory",
    """
        self._storage = storage
        self._device = device
""",
    """
        self._storage = torch.UntypedStorage(storage.nbytes(), device="meta")
        self._device = device
""",
    GDS_MARKS + "test_a_view_keeps_its_memory",
)
gds(
    "the mark of a read is set before its memory is taken",
    """
        target = self._device.new_storage(cut.num_bytes)
        return target, _DeviceView(target, self._device)
""",
    """
        view = _DeviceView(torch.UntypedStorage(cut.num_bytes), self._device)
        view._storage = target = self._device.new_storage(cut.num_bytes)
        return target, view
""",
    GDS_MARKS + "test_the_mark_of_a_read_is_set_after_its_memory_is_taken",
)
gds(
    "a short transfer is the end",
    """
            done += count
""",
    """
            done = body.num_bytes
""",
    GDS + "test_short_transfers_are_continued_where_they_stopped",
)
gds(
    "an error of kvikio is lost",
    """
                raise OSError(errno.EIO, str(error)) from None
""",
    """
                return
""",
    GDS + "test_a_failed_write_is_an_oserror_with_kvikios_words_and_ends_writing",
)

# -- tiers/tiered.py -----------------------------------------------------------------------------
tiered = table_of("tiers/tiered.py", MUTATIONS)

tiered(
    "a tier that refuses ends the search",
    """
            if started is not None:
                return started
""",
    """
            return started
""",
    TIERED + "test_a_tier_that_takes_no_more_is_left_out",
)
tiered(
    "one tier reads what another has",
    """
        return block.tier.begin_read(block, deadline)
""",
    """
        return self.tiers[0].begin_read(block, deadline)
""",
    "unit/test_tiers_side_by_side.py::test_a_block_is_read_by_the_tier_that_has_it",
)
tiered(
    "tiers beside one another are not bounded by their limits",
    """
            capped = {i for i in open_tiers if left * weights[i] / total > caps[i]}
""",
    """
            capped: set[int] = set()
""",
    TIERED + "test_a_small_fast_tier_fills_evenly_over_the_step",
)

# -- tiers/open.py -------------------------------------------------------------------------------
open_ = table_of("tiers/open.py", MUTATIONS)

open_(
    "the first tier stays open when the second does not open",
    """
            tier.close()
""",
    """
            pass
""",
    "unit/test_what_opens_closes.py::test_the_host_tier_is_closed_when_the_ssd_tier_does_not_open",
)
