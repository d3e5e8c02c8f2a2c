# SPDX-License-Identifier: Apache-2.0
"""Errors in what bounds a tier: bytes on their way, bytes a second, space."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

BUDGET = "unit/test_budget.py::"

budget = table_of("tiers/budget.py", MUTATIONS)

budget(
    "everything fits into the budget of bytes",
    """
        return self.taken_bytes == 0 or self.taken_bytes + num_bytes <= self.limit_bytes
""",
    """
        return True
""",
    BUDGET + "test_bytes_over_the_budget_wait_until_enough_are_given_back",
)
budget(
    "what is larger than the budget waits for ever",
    """
        return self.taken_bytes == 0 or self.taken_bytes + num_bytes <= self.limit_bytes
""",
    """
        return self.taken_bytes + num_bytes <= self.limit_bytes
""",
    "behaviour/test_memory_and_space_are_bounded.py::"
    "test_a_storage_larger_than_the_inflight_budget_still_goes",
    hangs=True,
)
budget(
    "what does not fit at once is taken",
    """
            fits = self._fits(num_bytes)
""",
    """
            fits = True
""",
    BUDGET + "test_what_does_not_fit_at_once_is_not_taken",
)
budget(
    "what does not fit at once is counted",
    """
            if fits:
                self.taken_bytes += num_bytes
""",
    """
            self.taken_bytes += num_bytes
""",
    BUDGET + "test_what_does_not_fit_at_once_is_not_taken",
)
budget(
    "what fits at once is not counted",
    """
            if fits:
                self.taken_bytes += num_bytes
""",
    "",
    BUDGET + "test_what_does_not_fit_at_once_is_not_taken",
)
budget(
    "nobody waits for the budget of bytes",
    """
            while not self._fits(num_bytes):
""",
    """
            while False:
""",
    BUDGET + "test_bytes_over_the_budget_wait_until_enough_are_given_back",
)
budget(
    "who was woken does not look again",
    """
            while not self._fits(num_bytes):
""",
    """
            if not self._fits(num_bytes):
""",
    BUDGET + "test_bytes_over_the_budget_wait_until_enough_are_given_back",
)
budget(
    "bytes that are let through are not counted",
    """
            self.taken_bytes += num_bytes
""",
    """
            pass
""",
    BUDGET + "test_bytes_over_the_budget_wait_until_enough_are_given_back",
)
budget(
    "bytes are not given back",
    """
            self.taken_bytes -= num_bytes
""",
    "",
    BUDGET + "test_bytes_over_the_budget_wait_until_enough_are_given_back",
)
budget(
    "giving back wakes nobody",
    """
            self._changed.notify_all()
""",
    "",
    BUDGET + "test_bytes_over_the_budget_wait_until_enough_are_given_back",
)
budget(
    "the rate is not limited",
    """
            return max(self._paid_at - time.monotonic(), 0.0)
""",
    """
            return 0.0
""",
    BUDGET + "test_what_was_charged_must_be_paid_before_the_next_transfer",
)
budget(
    "debts do not add up",
    """
            start = max(self._paid_at, time.monotonic())
""",
    """
            start = time.monotonic()
""",
    BUDGET + "test_what_was_charged_must_be_paid_before_the_next_transfer",
)
budget(
    "idle time pays for what comes later",
    """
            start = max(self._paid_at, time.monotonic())
""",
    """
            start = self._paid_at
""",
    BUDGET + "test_time_in_which_nothing_was_moved_pays_for_nothing_later",
)
budget(
    "space is granted without limit",
    """
            granted = min(num_bytes, self._left_bytes // granule * granule)
""",
    """
            granted = num_bytes
""",
    BUDGET + "test_space_is_granted_in_whole_granules_while_there_is_some",
)
budget(
    "parts of granules are granted",
    """
            granted = min(num_bytes, self._left_bytes // granule * granule)
""",
    """
            granted = min(num_bytes, self._left_bytes)
""",
    BUDGET + "test_space_is_granted_in_whole_granules_while_there_is_some",
)
budget(
    "space that was granted is granted again",
    """
            self._left_bytes -= granted
""",
    "",
    BUDGET + "test_space_is_granted_in_whole_granules_while_there_is_some",
)
budget(
    "space that was given back is lost",
    """
                self._left_bytes += num_bytes
""",
    """
                pass
""",
    BUDGET + "test_space_is_granted_in_whole_granules_while_there_is_some",
)
