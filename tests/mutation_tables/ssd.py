# SPDX-License-Identifier: Apache-2.0
"""Errors in the SSD tier: what transfers hold, what goes back, how parts make a whole.

Left out: `_allocate` asks a failed drive (which refuses, and is then left out).
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

SSD = "unit/test_ssd.py::"
STRIPED_WRITE = SSD + "test_a_striped_transfer_ends_with_its_last_part[write]"

ssd = table_of("tiers/ssd.py", MUTATIONS)

ssd(
    "a write does not keep its space",
    """
            [e.drive.begin_write(view, start, e, block) for start, e in _places(block)]
""",
    """
            [e.drive.begin_write(view, start, e, None) for start, e in _places(block)]
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_space_of_a_dead_record_is_not_reused_while_its_write_runs",
)
ssd(
    "a read does not keep its space",
    """
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)]
""",
    """
            [e.drive.begin_read(view, start, e, None, deadline) for start, e in _places(block)]
""",
    SSD + "test_a_running_read_keeps_its_target_and_its_space_when_nobody_else_does",
)
ssd(
    "space goes back with the first read instead of with the last reference",
    """
        target, view = self._access.for_reading(block.cut)
        return target, gather(
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)]
        )
""",
    """
        target, view = self._access.for_reading(block.cut)
        transfer = gather(
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)]
        )
        transfer.add_done_callback(lambda _: self.free(block))
        return target, transfer
""",
    "behaviour/test_every_way_through_a_step.py::test_backward_twice_through_one_graph",
)
ssd(
    "the deadline of a read is ignored",
    """
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)]
""",
    """
            [e.drive.begin_read(view, start, e, block, 0.0) for start, e in _places(block)]
""",
    SSD + "test_the_read_that_is_needed_first_goes_first",
)
ssd(
    "a block is freed twice",
    """
        extents, block.extents = block.extents, []
""",
    """
        extents = block.extents
""",
    SSD + "test_space_freed_by_hand_is_not_freed_again_when_its_block_dies",
)
ssd(
    "a block is never freed",
    """
        extents, block.extents = block.extents, []
""",
    """
        extents, block.extents = [], []
""",
    SSD + "test_space_of_a_block_that_nobody_refers_to_is_used_again",
)
ssd(
    "all parts of a body are taken from its beginning",
    """
        start += extent.num_bytes
""",
    "",
    STRIPED_WRITE,
)
ssd(
    "a write is done with its first part",
    """
            [e.drive.begin_write(view, start, e, block) for start, e in _places(block)]
        )
""",
    """
            [e.drive.begin_write(view, start, e, block) for start, e in _places(block)][:1]
        )
""",
    STRIPED_WRITE,
)
ssd(
    "a read is done with its first part",
    """
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)]
        )
""",
    """
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)][:1]
        )
""",
    SSD + "test_a_striped_transfer_ends_with_its_last_part[read]",
)
ssd(
    "what other drives gave is lost when one refuses",
    """
            for extent in extents:
                extent.free()
            drives.remove(refused)
""",
    """
            drives.remove(refused)
""",
    SSD + "test_parts_on_other_drives_go_back_when_one_refuses",
)
ssd(
    "staging memory goes before the transfers that use it have ended",
    """
        for drive in self.drives:
            drive.close()
        if self._staging is not None:
            self._staging.close()
""",
    """
        if self._staging is not None:
            self._staging.close()
        for drive in self.drives:
            drive.close()
""",
    SSD + "test_closing_waits_for_a_running_write_before_file_and_memory_go[True]",
)
ssd(
    "the bodies of several drives are aligned for the first",
    """
                max(drive.file.alignment.memory for drive in self.drives),
                max(drive.file.alignment.offset for drive in self.drives),
""",
    """
                self.drives[0].file.alignment.memory,
                self.drives[0].file.alignment.offset,
""",
    SSD + "test_drives_that_ask_for_different_alignments_both_get_theirs",
)
ssd(
    "what has opened stays open when the rest does not open",
    """
        except BaseException:
            self.close()
            raise
""",
    """
        except BaseException:
            raise
""",
    "unit/test_what_opens_closes.py::test_the_first_drive_is_closed_when_the_second_does_not_open",
)
