# SPDX-License-Identifier: Apache-2.0
"""Errors in what counts as bandwidth."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

METER = "unit/test_bandwidth.py::"

bandwidth = table_of("tiers/bandwidth.py", MUTATIONS)

bandwidth(
    "a transfer that failed counts",
    """
        moved_bytes = 0
        try:
""",
    """
        moved_bytes = num_bytes
        try:
""",
    METER + "test_a_transfer_that_fails_counts_its_time_and_no_bytes",
)
bandwidth(
    "what failed runs on",
    """
                self._running -= 1
""",
    """
                self._running -= bool(moved_bytes)
""",
    METER + "test_a_transfer_that_fails_counts_its_time_and_no_bytes",
)
bandwidth(
    "an idle drive looks slow",
    """
        if self._running:
""",
    """
        if self._since:
""",
    METER + "test_time_counts_once_while_at_least_one_transfer_runs",
)
bandwidth(
    "the time of a second transfer is lost",
    """
            self._count_time()
            self._running += 1
""",
    """
            self._since = time.monotonic()
            self._running += 1
""",
    METER + "test_time_counts_once_while_at_least_one_transfer_runs",
)
bandwidth(
    "the past weighs as much as the present",
    """
                    self._recent_s /= 2
                    self._recent_bytes /= 2
""",
    """
                    pass
""",
    METER + "test_the_rate_follows_a_change_and_the_total_does_not",
)
