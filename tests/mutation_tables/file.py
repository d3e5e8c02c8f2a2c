# SPDX-License-Identifier: Apache-2.0
"""Errors in the file: short and late transfers, growth, its name, its end."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

DRIVE = "unit/test_drive.py::"
READ_FAILS = "behaviour/test_failed_transfers.py::"
FILE = "unit/test_unlinked_file.py::"

file = table_of("tiers/file.py", MUTATIONS)

file(
    "a short write is the end",
    """
            count = os.pwritev(self.fd, [body[done:]], offset + done, self._flags)
            if count == 0:
                raise OSError(errno.EIO, f"the drive took {done} of {len(body)} bytes")
            done += count
""",
    """
            os.pwritev(self.fd, [body[done:]], offset + done, self._flags)
            break
""",
    READ_FAILS + "test_short_reads_and_writes_are_continued",
)
file(
    "a short read is the end",
    """
            count = os.preadv(self.fd, [body[done:]], offset + done, self._flags)
            if count == 0:
                raise OSError(errno.EIO, f"short read: got {done} of {len(body)} bytes")
            done += count
""",
    """
            os.preadv(self.fd, [body[done:]], offset + done, self._flags)
            break
""",
    READ_FAILS + "test_a_failed_read_names_rank_scope_place_and_errno[True]",
)
file(
    "what is left of a short write is taken from the beginning",
    """
            count = os.pwritev(self.fd, [body[done:]], offset + done, self._flags)
""",
    """
            count = os.pwritev(self.fd, [body], offset + done, self._flags)
""",
    READ_FAILS + "test_short_reads_and_writes_are_continued",
)
file(
    "what is left of a short read goes to the beginning",
    """
            count = os.preadv(self.fd, [body[done:]], offset + done, self._flags)
""",
    """
            count = os.preadv(self.fd, [body], offset + done, self._flags)
""",
    READ_FAILS + "test_short_reads_and_writes_are_continued",
)
file(
    "a buffered write does not wait for the disk",
    """
        if self.alignment == BUFFERED:
""",
    """
        if False:
""",
    FILE + "test_a_write_that_the_disk_refuses_later_is_an_error",
)
file(
    "an error of the disk is told to the first who asks, and to nobody else",
    """
            failed = self._write_error
""",
    """
            failed, self._write_error = self._write_error, None
""",
    DRIVE + "test_a_late_write_error_told_to_one_thread_counts_for_all",
)
file(
    "the error of the disk is lost",
    """
        if failed is not None:
            raise OSError(failed.errno, failed.strerror)
""",
    "",
    FILE + "test_a_write_that_the_disk_refuses_later_is_an_error",
)
file(
    "a file that could not grow keeps what it got",
    """
                os.ftruncate(self.fd, self.size_bytes)
""",
    """
                pass
""",
    FILE + "test_a_file_that_could_not_grow_is_as_it_was",
)
file(
    "a file without O_TMPFILE keeps its name",
    """
        os.unlink(name)
""",
    "",
    "behaviour/test_nothing_is_left_on_disk.py::"
    "test_a_file_system_without_o_tmpfile_gets_a_file_that_is_unlinked_at_once",
)
file(
    "others may open the file",
    """
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
""",
    """
        return os.open(directory, flags | os.O_TMPFILE, 0o666)
""",
    "behaviour/test_nothing_is_left_on_disk.py::test_the_file_has_no_name_and_mode_0600",
)
file(
    "a closed file can be written to under another's number",
    """
        fd, self.fd = self.fd, -1
""",
    """
        fd = self.fd
""",
    FILE + "test_a_closed_file_is_no_longer_its_number",
)
file(
    "a file that is of no use stays open",
    """
        except BaseException:
            self.close()
            raise
""",
    """
        except BaseException:
            raise
""",
    "unit/test_what_opens_closes.py::test_a_file_is_closed_when_its_trial_write_fails[buffered]",
)
