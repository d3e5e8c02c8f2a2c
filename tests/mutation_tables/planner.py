# SPDX-License-Identifier: Apache-2.0
"""Errors in the course of a planned run, and in what its ranks tell each other.

Left out: a run with a plan from a file that may adapt, which has no profile to adapt by; findings
that a new plan does not forget, because those that were made are forgotten when all are asked.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

PLANNER = "unit/test_planner.py::"
AGREES = "unit/test_planner_agrees.py::"
AGREEMENT = "unit/test_agreement.py::"

planner = table_of("planning/planner.py", MUTATIONS)

planner(
    "one measured step is enough",
    """
        elif self.measurement.num_detailed >= num_wanted:
""",
    """
        else:
""",
    PLANNER + "test_three_steps_are_offloaded_and_then_the_plan_is_followed",
)
planner(
    "a plan is not refined",
    """
        elif not self._is_refined and self._num_followed >= _STEPS_BEFORE_REFINING:
""",
    """
        elif False:
""",
    PLANNER + "test_a_plan_that_was_followed_for_some_steps_is_refined_once",
)
planner(
    "what earlier steps have freed counts in a new plan's",
    """
        self._device.return_freed_memory()  # it fitted what was kept until now
""",
    "",
    PLANNER + "test_what_earlier_steps_have_freed_is_returned_before_later_ones_are_judged",
)
planner(
    "a plan is refined again and again",
    """
                self._is_refined |= self.phase is Phase.REFINING
""",
    "",
    PLANNER + "test_a_plan_that_was_followed_for_some_steps_is_refined_once",
)
planner(
    "the last of the measured steps says what they need",
    """
        own_bytes = max((one.peak_bytes for one in measured), default=self._peak_bytes)
""",
    """
        own_bytes = self._peak_bytes
""",
    PLANNER + "test_the_largest_peak_of_the_measured_steps_counts",
)
planner(
    "each rank plans for its own whole steps",
    """
        step_s, peak_bytes = self._agreement.largest([own_s, float(own_bytes)])
""",
    """
        step_s, peak_bytes = own_s, own_bytes
""",
    AGREES + "test_the_first_plan_is_for_the_rank_that_takes_the_most_memory",
)
planner(
    "times are not calibrated",
    """
        return {"step_s": step_s or None, "peak_bytes": int(peak_bytes)}
""",
    """
        return {"step_s": None, "peak_bytes": int(peak_bytes)}
""",
    PLANNER + "test_the_profile_is_made_as_slow_as_whole_steps_are",
)
planner(
    "the policy is not told of the plan",
    """
        self._policy.follow(plan)
""",
    "",
    PLANNER + "test_three_steps_are_offloaded_and_then_the_plan_is_followed",
)
planner(
    "a rank without a plan does not say so",
    """
        _raise_first(one for _, one in told)
""",
    "",
    PLANNER + "test_a_budget_that_cannot_be_met_ends_the_run",
)
planner(
    "a budget that was given may be exceeded",
    """
                may_exceed = self._config.memory_budget_bytes is None
""",
    """
                may_exceed = True
""",
    PLANNER + "test_a_budget_that_cannot_be_met_ends_the_run",
)
planner(
    "a budget that nobody gave ends the run",
    """
            if not may_exceed:
                raise
""",
    """
            raise
""",
    PLANNER + "test_a_budget_that_nobody_gave_is_what_is_free_or_as_little_as_possible",
)
planner(
    "everything that is free may be taken",
    """
        share = _FREE_SHARE_OF_HOST if self._device.is_host else _FREE_SHARE
""",
    """
        share = 1.0
""",
    PLANNER + "test_a_budget_that_nobody_gave_is_what_is_free_or_as_little_as_possible",
)
FREE = AGREES + "test_what_is_free_is_shared_by_the_ranks_of_a_machine_and_the_least_in_the_group"
planner(
    "each rank of a machine takes all that is free",
    """
        ranks = self._stage.num_local_ranks if self._device.is_host else 1
""",
    """
        ranks = 1
""",
    FREE,
)
planner(
    "each rank of a group has a budget of its own",
    """
        least = -self._agreement.largest([-float(int(free * share) // ranks)])[0]
""",
    """
        least = float(int(free * share) // ranks)
""",
    FREE,
)
planner(
    "ranks may follow different first plans",
    """
        assert plan is not None and self.profile is not None
        check_same(plan, self._agreement)
""",
    """
        assert plan is not None and self.profile is not None
""",
    AGREES + "test_ranks_with_different_plans_stop",
)
planner(
    "ranks may follow different later plans",
    """
        plan = before if any_failed or after is None else after
        check_same(plan, self._agreement)
""",
    """
        plan = before if any_failed or after is None else after
""",
    AGREES + "test_ranks_with_different_plans_stop",
)
planner(
    "each rank plans by its own profile",
    """
        )
        return agreed_profile(profile, self._agreement)
""",
    """
        )
        return profile
""",
    AGREES + "test_the_profile_is_the_groups",
)
planner(
    "a rank goes on to a plan that another did not find",
    """
        plan = before if any_failed or after is None else after
""",
    """
        plan = before if after is None else after
""",
    AGREES + "test_where_one_rank_finds_no_plan_all_keep_theirs",
)
planner(
    "only the rank that is over its budget plans",
    """
        if any_over:
""",
    """
        if over:
""",
    AGREES + "test_a_rank_over_its_budget_makes_all_plan_at_once",
)
planner(
    "only the rank that noticed a change measures",
    """
        elif any_cause:
""",
    """
        elif cause:
""",
    AGREES + "test_a_rank_that_notices_a_change_makes_all_measure[cause]",
)
planner(
    "only the rank that noticed an effect measures",
    """
        elif any_effect:
""",
    """
        elif effect:
""",
    AGREES + "test_a_rank_that_notices_a_change_makes_all_measure[effect]",
)
planner(
    "plans take turns as long as what they do is not expected",
    """
        if changed and reason != "effect":
""",
    """
        if changed:
""",
    PLANNER + "test_another_peak_than_was_predicted_is_planned_for_more_and_more_rarely[True]",
)
planner(
    "what the first plan does is compared before it was refined",
    """
                if self._is_refined and self._num_followed > self._patient_steps["effect"]:
""",
    """
                if self._num_followed > self._patient_steps["effect"]:
""",
    PLANNER + "test_until_the_plan_is_refined_only_causes_count",
)
planner(
    "what a plan does is compared at once though the last did not help",
    """
                if self._is_refined and self._num_followed > self._patient_steps["effect"]:
""",
    """
                if self._is_refined:
""",
    PLANNER + "test_another_peak_than_was_predicted_is_planned_for_more_and_more_rarely[True]",
)
planner(
    "ranks ask each other after every step",
    """
        if self._num_followed % self._agreement.period_steps:
""",
    """
        if False:
""",
    PLANNER + "test_what_is_noticed_between_the_steps_at_which_ranks_ask_is_not_lost",
)
planner(
    "what was noticed between is forgotten",
    """
                self._cause = self._cause or drift.cause(step)
""",
    """
                self._cause = drift.cause(step)
""",
    PLANNER + "test_what_is_noticed_between_the_steps_at_which_ranks_ask_is_not_lost",
)
planner(
    "too much memory is not noticed",
    """
                self._over = self._over or drift.over_budget(step)
""",
    """
                pass
""",
    PLANNER + "test_more_memory_than_the_budget_is_planned_for_at_once",
)
planner(
    "a plan that is to save memory counts on what the tiers were",
    """
            self._plan_again(self._profile_of_present_tiers())
""",
    """
            self._plan_again(self.profile)
""",
    PLANNER + "test_a_plan_that_is_to_save_memory_counts_on_the_tiers_as_they_are",
)
planner(
    "each rank counts on its own tiers when memory is short",
    """
        profile = dataclasses.replace(self.profile, tiers=self.measurement.tiers())
        return agreed_profile(profile, self._agreement)
""",
    """
        return dataclasses.replace(self.profile, tiers=self.measurement.tiers())
""",
    AGREES + "test_a_rank_over_its_budget_makes_all_plan_at_once",
)
planner(
    "a plan that did not help is made again at once",
    """
            if self._num_followed > self._patient_steps["over"]:
""",
    """
            if True:
""",
    PLANNER + "test_more_memory_than_the_budget_is_planned_for_at_once",
)
planner(
    "patience never grows",
    """
            longer = max(2 * self._patient_steps[reason], 4)
""",
    """
            longer = 0
""",
    PLANNER + "test_more_memory_than_the_budget_is_planned_for_at_once",
)
planner(
    "patience with one thing is patience with all",
    """
            if self._num_followed > self._patient_steps["over"]:
""",
    """
            if self._num_followed > max(self._patient_steps.values()):
""",
    PLANNER + "test_a_run_that_is_patient_with_what_plans_do_is_not_with_too_much_memory",
)
planner(
    "a new plan has been followed for long",
    """
        self._num_followed = 0
""",
    "",
    PLANNER + "test_more_memory_than_the_budget_is_planned_for_at_once",
)
planner(
    "what a new plan cannot change is noticed again and again",
    """
            usual = (whole_steps["step_s"] or step.step_s) / predicted.step_s
""",
    """
            usual = 1.0
""",
    AGREES + "test_a_step_that_planning_again_leaves_slow_is_usual_from_then_on",
)
planner(
    "sizes that are new are measured though two are known",
    """
            fitted_profile = self._fitted()
""",
    """
            fitted_profile = None
""",
    PLANNER + "test_other_sizes_are_measured_and_a_third_one_is_fitted",
)

WORTH = PLANNER + "test_a_plan_takes_the_place_of_another_if_that_is_worth_it"
planner(
    "a plan that is hardly better takes the place of the present one",
    """
                if not self._is_worthwhile(after, simulate(profile)):
""",
    """
                if False:
""",
    WORTH,
)
planner(
    "a plan that is kept goes on predicting what it did",
    """
                    after = dataclasses.replace(before, predicted=simulate(profile))
""",
    """
                    after = before
""",
    WORTH,
)
planner(
    "a faster plan is not worth it",
    """
        return present.step_s > least_s or present.peak_bytes > least_bytes
""",
    """
        return present.peak_bytes > least_bytes
""",
    WORTH,
)
planner(
    "a smaller plan is not worth it",
    """
        return present.step_s > least_s or present.peak_bytes > least_bytes
""",
    """
        return present.step_s > least_s
""",
    WORTH,
)
planner(
    "it is worth it to stay below the budget",
    """
            least_bytes = max(least_bytes, self._budget_bytes)
""",
    """
            pass
""",
    WORTH,
)
planner(
    "it is worth it to save a byte",
    """
        least_bytes = plan.predicted.peak_bytes * (1 + _WORTHWHILE)
""",
    """
        least_bytes = plan.predicted.peak_bytes
""",
    WORTH,
)
planner(
    "it is worth it to save a moment",
    """
        least_s = plan.predicted.step_s * (1 + _WORTHWHILE)
""",
    """
        least_s = plan.predicted.step_s
""",
    WORTH,
)
planner(
    "steps that go otherwise are measured by one step alone",
    """
            self._say("effect", effect or "another rank's steps go otherwise than planned")
            self._refine()
""",
    """
            self._say("effect", effect or "another rank's steps go otherwise than planned")
            self.phase = Phase.UPDATING
""",
    PLANNER + "test_steps_that_take_longer_or_less_long_than_planned_are_measured_like_a_new_run",
)
planner(
    "what was freed is not returned before steps are measured again",
    """
    def _refine(self) -> None:
        self._device.return_freed_memory()
""",
    """
    def _refine(self) -> None:
""",
    PLANNER + "test_what_earlier_steps_have_freed_is_returned_before_later_ones_are_judged",
)

CALIBRATION = "unit/test_calibration.py::"

calibration = table_of("planning/calibration.py", MUTATIONS)

calibration(
    "parts stay as fast as they seemed",
    """
        profile = _slower(profile, min(max(factor, 1 / _MOST_SCALED), _MOST_SCALED))
""",
    "",
    CALIBRATION + "test_other_plans_get_slower_by_the_same_factor",
)
calibration(
    "what scaling cannot explain is forgotten",
    """
        step_fixed_s = max(profile.step_fixed_s + missing_s, 0.0)
""",
    """
        step_fixed_s = profile.step_fixed_s
""",
    CALIBRATION + "test_the_simulation_shows_what_was_measured",
)
calibration(
    "memory beside the activations is not learned",
    """
    missing_bytes = peak_bytes - simulate(profile).peak_bytes
""",
    """
    missing_bytes = 0
""",
    CALIBRATION + "test_the_simulation_shows_what_was_measured",
)
calibration(
    "memory beside the activations is less than none",
    """
    transient_bytes = max(profile.transient_bytes + missing_bytes, 0)
""",
    """
    transient_bytes = profile.transient_bytes + missing_bytes
""",
    CALIBRATION
    + "test_less_memory_than_simulated_is_taken_from_working_memory_as_far_as_there_is_some",
)

agreement = table_of("planning/agreement.py", MUTATIONS)

agreement(
    "each rank has its own seconds",
    """
    means = agreement.means(seconds)
""",
    """
    means = seconds
""",
    AGREEMENT + "test_both_get_mean_seconds_and_rates_and_the_larger_sizes",
)
agreement(
    "each rank has its own sizes",
    """
    largest = agreement.largest([float(size) for size in sizes])  # exact below 2^53
""",
    """
    largest = [float(size) for size in sizes]
""",
    AGREEMENT + "test_both_get_mean_seconds_and_rates_and_the_larger_sizes",
)
agreement(
    "different plans are no error",
    """
    if high != -negative_low:
""",
    """
    if False:
""",
    AGREEMENT + "test_different_plans_are_an_error_on_both",
)
agreement(
    "one of two ranks does not notice that plans differ",
    """
    high, negative_low = agreement.largest([digest, -digest])
""",
    """
    high, negative_low = agreement.largest([digest, 0.0])[0], -digest
""",
    AGREEMENT + "test_different_plans_are_an_error_on_both",
)
