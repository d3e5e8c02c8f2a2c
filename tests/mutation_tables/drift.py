# SPDX-License-Identifier: Apache-2.0
"""Errors in how a plan and the steps that follow it are compared, and in what those steps show.

Left out: a stall that is compared with nothing, which differs only within a tenth of a step.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

PLANNER = "unit/test_planner.py::"
WATCH = "unit/test_watch.py::"
MEASUREMENT = "unit/test_measurement.py::"

drift = table_of("planning/drift.py", MUTATIONS)

drift(
    "one cause is enough",
    """
        return reason if self._num_causes >= _PATIENCE else ""
""",
    """
        return reason
""",
    PLANNER + "test_one_disturbed_step_is_no_drift",
)
drift(
    "causes need not be in a row",
    """
        self._num_causes = self._num_causes + 1 if reason else 0
""",
    """
        self._num_causes += 1 if reason else 0
""",
    PLANNER + "test_one_disturbed_step_is_no_drift",
)
drift(
    "one effect is enough",
    """
        return reason if self._num_effects >= _PATIENCE else ""
""",
    """
        return reason
""",
    PLANNER + "test_one_disturbed_step_is_no_drift",
)
drift(
    "effects need not be in a row",
    """
        self._num_effects = self._num_effects + 1 if reason else 0
""",
    """
        self._num_effects += 1 if reason else 0
""",
    PLANNER + "test_one_disturbed_step_is_no_drift",
)
drift(
    "other sizes are not noticed",
    """
        if not self.is_comparable(step) and not is_smaller:
""",
    """
        if False:
""",
    PLANNER + "test_drift_says_what_is_no_longer_so",
)
drift(
    "smaller sizes are a change at once",
    """
        if not self.is_comparable(step) and not is_smaller:
""",
    """
        if not self.is_comparable(step):
""",
    WATCH + "test_steps_of_other_sizes_show_nothing_of_what_the_plan_led_to",
)
drift(
    "smaller sizes are planned for when the first has come",
    """
        return _other_sizes(step) if self._num_smaller >= _PATIENCE_WITH_SMALLER else ""
""",
    """
        return _other_sizes(step) if self._num_smaller else ""
""",
    WATCH + "test_only_what_stays_smaller_is_planned_for",
)
drift(
    "smaller sizes need not be in a row",
    """
        self._num_smaller = self._num_smaller + 1 if is_smaller and step.sizes else 0
""",
    """
        self._num_smaller += 1 if is_smaller and step.sizes else 0
""",
    WATCH + "test_only_what_stays_smaller_is_planned_for",
)
drift(
    "a slower tier is not noticed",
    """
        return self._other_bandwidth(step, 0.0, _LESS_BANDWIDTH)
""",
    """
        return ""
""",
    PLANNER + "test_a_disk_that_becomes_slow_is_planned_for_within_five_steps",
)
drift(
    "compute that waits is not noticed",
    """
        if step.stall_s > expected.stall_s + _STALLED * predicted_s:
""",
    """
        if False:
""",
    PLANNER + "test_drift_says_what_was_not_expected",
)
drift(
    "steps that take another time are not noticed",
    """
        if differs and len(recent_s) == JUDGED_STEPS:
""",
    """
        if False:
""",
    PLANNER + "test_the_median_of_some_steps_says_whether_they_take_as_long_as_planned",
)
drift(
    "steps that are faster than planned are not noticed",
    """
        differs = abs(median_s - predicted_s) > _OTHER_TIME * predicted_s
""",
    """
        differs = median_s - predicted_s > _OTHER_TIME * predicted_s
""",
    PLANNER + "test_what_planning_again_did_not_change_is_usual",
)
drift(
    "one step that takes another time is enough",
    """
        median_s = statistics.median(recent_s)
""",
    """
        median_s = step.step_s
""",
    PLANNER + "test_the_median_of_some_steps_says_whether_they_take_as_long_as_planned",
)
drift(
    "the first steps are judged alone",
    """
        if differs and len(recent_s) == JUDGED_STEPS:
""",
    """
        if differs:
""",
    PLANNER + "test_a_few_steps_are_not_judged",
)
drift(
    "another peak is not noticed",
    """
        if difference_bytes > max(_OTHER_PEAK * expected.peak_bytes, _LEAST_BYTES):
""",
    """
        if False:
""",
    PLANNER + "test_drift_says_what_was_not_expected",
)
drift(
    "a lower peak is not noticed",
    """
        difference_bytes = abs(step.peak_bytes - expected.peak_bytes)
""",
    """
        difference_bytes = step.peak_bytes - expected.peak_bytes
""",
    PLANNER + "test_drift_says_what_was_not_expected",
)
drift(
    "a few pages are another peak",
    """
        if difference_bytes > max(_OTHER_PEAK * expected.peak_bytes, _LEAST_BYTES):
""",
    """
        if difference_bytes > _OTHER_PEAK * expected.peak_bytes:
""",
    PLANNER + "test_a_few_pages_are_no_other_peak",
)
drift(
    "a faster tier is not noticed",
    """
        return self._other_bandwidth(step, _MORE_BANDWIDTH, math.inf)
""",
    """
        return ""
""",
    PLANNER
    + "test_a_tier_that_is_slower_is_a_cause_and_one_that_is_faster_an_effect[201-False-True]",
)
drift(
    "a tier as fast as ever is noticed",
    """
        return self._other_bandwidth(step, _MORE_BANDWIDTH, math.inf)
""",
    """
        return self._other_bandwidth(step, _LESS_BANDWIDTH, math.inf)
""",
    PLANNER
    + "test_a_tier_that_is_slower_is_a_cause_and_one_that_is_faster_an_effect[51-False-False]",
)
drift(
    "what is usual is noticed",
    """
        predicted_s = expected.step_s * self._usual
""",
    """
        predicted_s = expected.step_s
""",
    PLANNER + "test_what_planning_again_did_not_change_is_usual",
)
drift(
    "a byte over the budget counts",
    """
        if budget_bytes is None or step.peak_bytes <= budget_bytes * OVER_BUDGET:
""",
    """
        if budget_bytes is None or step.peak_bytes <= budget_bytes:
""",
    PLANNER + "test_a_budget_is_exceeded_by_more_than_what_cannot_be_measured",
)
drift(
    "no memory is too much",
    """
        if budget_bytes is None or step.peak_bytes <= budget_bytes * OVER_BUDGET:
""",
    """
        if True:
""",
    PLANNER + "test_a_budget_is_exceeded_by_more_than_what_cannot_be_measured",
)

measurement = table_of("planning/measurement.py", MUTATIONS)

measurement(
    "what a tier did before a change still counts",
    """
            tier_profiles(self._engine.tiers, self._rates if previous is not None else {}),
""",
    """
            tier_profiles(self._engine.tiers),
""",
    MEASUREMENT + "test_after_a_change_a_profile_counts_on_the_last_step_alone",
)
measurement(
    "the first profile is of the last step alone",
    """
            tier_profiles(self._engine.tiers, self._rates if previous is not None else {}),
""",
    """
            tier_profiles(self._engine.tiers, self._rates),
""",
    MEASUREMENT + "test_after_a_change_a_profile_counts_on_the_last_step_alone",
)
measurement(
    "a step shows what a tier did on average",
    """
        return tuple(tier_profiles(self._engine.tiers, self._rates))
""",
    """
        return tuple(tier_profiles(self._engine.tiers))
""",
    MEASUREMENT + "test_a_step_says_how_fast_the_tier_was_in_it",
)
measurement(
    "a tier that was not written to is compared",
    """
            if since[Placement(tier.name)].written_bytes
""",
    "",
    MEASUREMENT + "test_a_step_says_how_fast_the_tier_was_in_it",
)
measurement(
    "any moment is long enough to tell a rate",
    """
            self.written_bytes / self.write_s if self.write_s >= _LEAST_BUSY_S else None,
""",
    """
            self.written_bytes / self.write_s if self.write_s else None,
""",
    MEASUREMENT + "test_what_was_too_short_to_tell_counts_as_before",
)
measurement(
    "a step is as large as the largest before it",
    """
        self.profiler.sizes.clear()
""",
    "",
    MEASUREMENT + "test_the_largest_micro_batch_of_a_step_is_its_size",
)
measurement(
    "a profile is of the size of the last step",
    """
            self._detailed_sizes = max(both, key=tokens_of)
""",
    """
            self._detailed_sizes = both[-1]
""",
    MEASUREMENT + "test_the_largest_micro_batch_of_a_step_is_its_size",
)
measurement(
    "a profile is of the size of an earlier one",
    """
        self._detailed_sizes = {}
""",
    "",
    MEASUREMENT + "test_the_largest_micro_batch_of_a_step_is_its_size",
)

PROFILER = "unit/test_profiler.py::"

table_of("planning/profiler.py", MUTATIONS)(
    "the last micro-batch says how large a step is",
    """
            if sequence_length * micro_batch_size > tokens_of(self.sizes):
""",
    """
            if True:
""",
    PROFILER + "test_of_micro_batches_with_several_sizes_the_largest_counts",
)

table_of("planning/fit.py", MUTATIONS)(
    "a line through two sizes may go down",
    """
    if (_saved_bytes(other) - _saved_bytes(one)) * (high - low) <= 0:
""",
    """
    if False:
""",
    PROFILER + "test_two_sizes_give_the_profile_of_a_third",
)
