# SPDX-License-Identifier: Apache-2.0
"""Errors in a drive: what transfers hold, failures, checksums, space."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

SSD = "unit/test_ssd.py::"
DRIVE = "unit/test_drive.py::"
PIECES = SSD + "test_a_drive_moves_piece_by_piece_and_passes_on_what_is_right"
READ_FAILS = "behaviour/test_failed_transfers.py::"

drive = table_of("tiers/drive.py", MUTATIONS)

drive(
    "a write does not hold the owner of its space",
    """
        def work(_: object = owner) -> None:
            self._write(view, start, extent)
""",
    """
        def work() -> None:
            self._write(view, start, extent)
""",
    SSD + "test_a_running_write_keeps_its_space_when_nobody_else_does",
)
drive(
    "a read does not hold the owner of its space",
    """
        def work(_: object = owner) -> None:
            self._read(view, start, extent)
""",
    """
        def work() -> None:
            self._read(view, start, extent)
""",
    SSD + "test_a_running_read_keeps_its_target_and_its_space_when_nobody_else_does",
)
drive(
    "a buffer is not given back after an error",
    """
        with contextlib.closing(view.pieces_to_fill(start, extent.num_bytes)) as pieces:
            for body in pieces:
""",
    """
        with contextlib.nullcontext(view.pieces_to_fill(start, extent.num_bytes)) as pieces:
            self._left_open = pieces
            for body in pieces:
""",
    PIECES,
)
drive(
    "all pieces are written to one place",
    """
                if self._checksum is not None:
                    checksums.append(self._checksum(body))
                offset += len(body)
""",
    """
                if self._checksum is not None:
                    checksums.append(self._checksum(body))
""",
    PIECES,
)
drive(
    "all pieces are read from one place",
    """
                        f"checksum mismatch: the drive gave back other bytes ({extent})",
                    )
                offset += len(body)
""",
    """
                        f"checksum mismatch: the drive gave back other bytes ({extent})",
                    )
""",
    PIECES,
)
drive(
    "a piece is passed on before its checksum was compared",
    """
                if self._checksum is not None and self._checksum(body) != next(checksums):
""",
    """
                before, body = body, next(pieces, body)
                if self._checksum is not None and self._checksum(before) != next(checksums):
""",
    PIECES,
)
drive(
    "a written piece does not count",
    """
                    with self.statistics.writes.moving(len(body)):
                        self.file.write(body, offset)
""",
    """
                    self.file.write(body, offset)
""",
    PIECES,
)
drive(
    "a failed write counts as done",
    """
                    self._fail(error)
                    raise
""",
    """
                    self._fail(error)
""",
    READ_FAILS + "test_failed_writes_keep_the_bytes_and_warn_once",
)
drive(
    "a failed write does not mark the drive",
    """
                    self._fail(error)
                    raise
""",
    """
                    raise
""",
    READ_FAILS + "test_failed_writes_keep_the_bytes_and_warn_once",
)
drive(
    "a failed read counts as done",
    """
                    raise OSError(error.errno, f"{error.strerror} ({extent})") from None
""",
    """
                    pass
""",
    READ_FAILS + "test_a_failed_read_names_rank_scope_place_and_errno[True]",
)
drive(
    "a failed read does not say where",
    """
                    raise OSError(error.errno, f"{error.strerror} ({extent})") from None
""",
    """
                    raise
""",
    DRIVE + "test_a_failed_read_keeps_nothing_alive",
)
drive(
    "no checksum is compared",
    """
                if self._checksum is not None and self._checksum(body) != next(checksums):
""",
    """
                if False:
""",
    PIECES,
)
drive(
    "no checksum is taken",
    """
                    checksums.append(self._checksum(body))
""",
    """
                    checksums.append(0)
""",
    PIECES,
)
drive(
    "a failed drive hands out space",
    """
            if self.health is Health.FAILED:
                return None
""",
    "",
    SSD + "test_a_failed_drive_hands_out_no_extents",
)
drive(
    "a failed drive counts as good",
    """
        self.health = Health.FAILED
""",
    """
        pass
""",
    SSD + "test_after_a_failed_write_nothing_more_is_written",
)
drive(
    "a full disk is asked again and again",
    """
        if self.health is Health.FULL:
            return False
""",
    "",
    DRIVE + "test_near_its_end_a_disk_is_asked_for_less_and_at_last_for_what_is_missing",
)
drive(
    "an error of the disk is called a lack of room",
    """
        if number not in _NO_ROOM:
""",
    """
        if False:
""",
    DRIVE + "test_only_a_lack_of_room_is_called_full[5-Health.FAILED]",
)
drive(
    "the disk's refusal keeps what it came through",
    """
                reason, number = str(error), error.errno
""",
    """
                reason, number = str(error), error.errno
                self.refusal = error
""",
    DRIVE + "test_refused_growth_keeps_nothing_alive[1]",
)
drive(
    "space that nobody could use is lost to the budget",
    """
            self._space.give_back(granted)
            self._warn_used_up()
""",
    """
            self._warn_used_up()
""",
    SSD + "test_what_the_disk_refused_or_nobody_could_use_goes_back_to_the_budget",
)
drive(
    "space that the disk refused is lost to the budget",
    """
        self._space.give_back(granted)
        if number not in _NO_ROOM:
""",
    """
        if number not in _NO_ROOM:
""",
    SSD + "test_what_the_disk_refused_or_nobody_could_use_goes_back_to_the_budget",
)
drive(
    "space that growth did not use is lost to the budget",
    """
                self._space.give_back(granted - wanted)
""",
    "",
    DRIVE + "test_what_growth_did_not_use_goes_back_to_the_budget",
)
drive(
    "growth does not ask the budget",
    """
        granted = self._space.take(max(missing, self._growth_bytes), self.extents.granule)
""",
    """
        granted = max(missing, self._growth_bytes)
""",
    "behaviour/test_memory_and_space_are_bounded.py::"
    "test_over_the_ssd_budget_activations_stay_in_memory",
)
drive(
    "space that is reserved does not count",
    """
        granted = self._space.take(wanted, self.extents.granule)
""",
    """
        granted = wanted
""",
    SSD + "test_space_that_is_reserved_counts",
)
drive(
    "extents that were freed are not used again",
    """
            self.extents.free(self._freed.popleft())
""",
    """
            self._freed.popleft()
""",
    SSD + "test_space_of_a_block_that_nobody_refers_to_is_used_again",
)
drive(
    "a finalizer takes the drive's lock",
    """
        self.drive._freed.append(self.offset)
""",
    """
        with self.drive._lock:
            self.drive.extents.free(self.offset)
""",
    SSD + "test_an_extent_can_be_freed_while_another_thread_holds_the_lock",
)
drive(
    "the file is closed before its transfers have ended",
    """
        self._threads.close()
        self.file.close()
""",
    """
        self.file.close()
        self._threads.close()
""",
    SSD + "test_closing_waits_for_a_running_write_before_file_and_memory_go[False]",
)
drive(
    "a file without threads stays open",
    """
            file.close()
            raise
""",
    """
            raise
""",
    "unit/test_what_opens_closes.py::"
    "test_file_and_threads_end_when_the_system_starts_no_more_threads[0]",
)
