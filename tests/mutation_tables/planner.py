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
RETURNED = PLANNER + "test_what_the_allocator_keeps_is_returned_after_steps_over_the_budget"
planner(
    "the allocator keeps its memory for reuse after steps over the budget",
    """
        if budget_bytes is not None and last is not None and last.peak_bytes > budget_bytes:
""",
    """
        if False:
""",
    RETURNED + "[1001-2]",
)
planner(
    "the allocator gives its memory back after each step",
    """
        if budget_bytes is not None and last is not None and last.peak_bytes > budget_bytes:
""",
    """
        if budget_bytes is not None and last is not None:
""",
    RETURNED + "[1000-0]",
)
planner(
    "the last of the measured steps says what they need",
    """
        own_bytes = max((one.peak_bytes for one in steps), default=0)
""",
    """
        own_bytes = steps[-1].peak_bytes if steps else 0
""",
    PLANNER + "test_the_largest_peak_of_the_measured_steps_counts",
)
planner(
    "after a peak above the budget steps are taken to last as long as before",
    """
            steps = [self.measurement.last]
""",
    """
            steps = [dataclasses.replace(self.measurement.last, step_s=0.0)]
""",
    PLANNER + "test_a_step_over_its_budget_says_how_long_it_took",
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
        raise_first(one for _, one in told)
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
        self._own_tiers = profile.tiers
        return agreed_profile(profile, self._agreement)
""",
    """
        self._own_tiers = profile.tiers
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
    "a plan that is to save memory counts on what the tiers were",
    """
            self._plan_again(self._as_now(self._agreed_fitted() or self.profile))
""",
    """
            self._plan_again(self.profile)
""",
    PLANNER + "test_a_plan_that_is_to_save_memory_counts_on_the_tiers_as_they_are",
)
OVER = PLANNER + "test_steps_over_the_budget_are_planned_for_at_once_with_their_own_sizes"
planner(
    "a plan that is to save memory is for the last sizes, whatever the present ones are",
    """
        profile = dataclasses.replace(profile, tiers=self._own_tiers, sizes=sizes)
""",
    """
        profile = dataclasses.replace(profile, tiers=self._own_tiers)
""",
    OVER + "[False]",
)
planner(
    "a plan that is to save memory is from the figures of other sizes",
    """
            self._plan_again(self._as_now(self._agreed_fitted() or self.profile))
""",
    """
            self._plan_again(self._as_now(self.profile))
""",
    OVER + "[True]",
)
planner(
    "each rank counts on its own tiers when memory is short",
    """
        profile = dataclasses.replace(profile, tiers=self._own_tiers, sizes=sizes)
        return agreed_profile(profile, self._agreement)
""",
    """
        return dataclasses.replace(profile, tiers=self._own_tiers, sizes=sizes)
""",
    AGREES + "test_a_rank_over_its_budget_makes_all_plan_at_once",
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
            fitted_profile = self._agreed_fitted()
""",
    """
            fitted_profile = None
""",
    PLANNER + "test_other_sizes_are_measured_and_a_third_one_is_fitted",
)
FITTED = AGREES + "test_a_profile_is_fitted_where_all_ranks_have_micro_batches_of_one_size"
planner(
    "a rank fits a profile to sizes that others of its group do not have",
    """
        if fitted_profile is None or high != -negative_low:
""",
    """
        if fitted_profile is None:
""",
    FITTED,
)
planner(
    "each rank fits a profile of its own",
    """
        return agreed_profile(fitted_profile, self._agreement)
""",
    """
        return fitted_profile
""",
    FITTED,
)
planner(
    "a rank's drive is compared with the mean of the group",
    """
                plan.predicted, self.profile.sizes, self._own_tiers, self._budget_bytes, usual
""",
    """
                plan.predicted, self.profile.sizes, self.profile.tiers, self._budget_bytes, usual
""",
    AGREES + "test_a_drive_slower_than_the_groups_mean_is_no_change",
)

WORTH = PLANNER + "test_a_plan_takes_the_place_of_another_if_that_is_worth_it"
planner(
    "a plan that is hardly better takes the place of the present one",
    """
                if not self._is_worthwhile(after, present):
""",
    """
                if False:
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
            least_bytes = self._budget_bytes  # no use in less, and no more will do
""",
    """
            pass
""",
    WORTH,
)
planner(
    "a plan that is over the budget has to be that by more than a little",
    """
        if self._budget_bytes is not None and plan.predicted.peak_bytes <= self._budget_bytes:
            least_bytes = self._budget_bytes  # no use in less, and no more will do
""",
    """
        if self._budget_bytes is not None:
            least_bytes = max(least_bytes, self._budget_bytes)
""",
    WORTH,
)
planner(
    "where no plan fits every one of them will do",
    """
        if self._budget_bytes is not None and plan.predicted.peak_bytes <= self._budget_bytes:
""",
    """
        if self._budget_bytes is not None:
""",
    WORTH,
)
BELOW = PLANNER + "test_plans_stay_below_a_budget_that_was_exceeded"
planner(
    "a budget that was exceeded is aimed at again",
    """
            self._num_exceeded += 1
""",
    "",
    BELOW,
)
planner(
    "plans stay further and further below a budget",
    """
        headroom = min(_HEADROOM * self._num_exceeded, _MOST_HEADROOM)
""",
    """
        headroom = _HEADROOM * self._num_exceeded
""",
    BELOW,
)
planner(
    "a plan that keeps to the budget is warned of",
    """
            if self._budget_bytes is None or error.smallest_bytes > self._budget_bytes:
""",
    """
            if True:
""",
    PLANNER + "test_a_plan_between_what_is_aimed_at_and_the_budget_will_do",
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
    "what was freed is not returned before steps are measured again",
    """
            self._device.return_freed_memory()
            self.phase = Phase.REFINING
""",
    """
            self.phase = Phase.REFINING
""",
    PLANNER + "test_what_earlier_steps_have_freed_is_returned_before_later_ones_are_judged",
)

planner(
    "a plan that is kept goes on predicting what it did",
    """
                    after = dataclasses.replace(before, predicted=present, fastest=after.fastest)
""",
    """
                    after = before
""",
    WORTH,
)
planner(
    "a plan is not refined",
    """
        elif self._reason is Reason.EFFECT or is_to_be_refined:
""",
    """
        elif self._reason is Reason.EFFECT:
""",
    PLANNER + "test_a_plan_that_was_followed_for_some_steps_is_refined_once",
)
planner(
    "steps that go otherwise are measured by one step alone",
    """
        elif self._reason is Reason.EFFECT or is_to_be_refined:
            self._device.return_freed_memory()
            self.phase = Phase.REFINING
""",
    """
        elif self._reason is Reason.EFFECT or is_to_be_refined:
            self._device.return_freed_memory()
            self.phase = Phase.UPDATING if self._is_refined else Phase.REFINING
""",
    PLANNER + "test_steps_that_take_longer_or_less_long_than_planned_are_measured_like_a_new_run",
)
planner(
    "ranks ask each other after every step",
    """
        if num_followed % self._agreement.period_steps:
""",
    """
        if False:
""",
    PLANNER + "test_what_is_noticed_between_the_steps_at_which_ranks_ask_is_not_lost",
)
planner(
    "what the first plan does is compared before it was refined",
    """
        self._watch.see(self.measurement.last, with_effects=self._is_refined)
""",
    """
        self._watch.see(self.measurement.last, with_effects=True)
""",
    PLANNER + "test_until_the_plan_is_refined_only_causes_count",
)
planner(
    "only the rank that noticed a change measures",
    """
        reasons = [reason for reason, anybody in zip(Reason, told, strict=True) if anybody]
""",
    """
        reasons = [reason for reason in Reason if found[reason]]
""",
    AGREES + "test_a_rank_that_notices_a_change_makes_all_measure[Reason.EFFECT]",
)
planner(
    "the least urgent reason counts",
    """
        self._reason = reasons[0] if reasons else None
""",
    """
        self._reason = reasons[-1] if reasons else None
""",
    AGREES + "test_the_most_urgent_reason_counts",
)
planner(
    "what a plan was made for is forgotten",
    """
        self._watch.planned(self._reason, changed=changed)
""",
    """
        self._watch.planned(None, changed=changed)
""",
    PLANNER + "test_more_memory_than_the_budget_is_planned_for_at_once",
)
planner(
    "a new plan is compared with what the last one led to",
    """
        self._watch.follow(drift)
""",
    "",
    PLANNER + "test_more_memory_than_the_budget_is_planned_for_at_once",
)

planner(
    "the steps measured in detail alone say how long a step takes",
    """
            steps = [*steps, *self._watch.recent]
""",
    """
            pass
""",
    PLANNER + "test_all_steps_since_a_plan_settled_say_how_long_a_step_takes[2]",
)
planner(
    "steps before a change say how long one takes after it",
    """
        if self.phase is Phase.REFINING:  # nothing has changed since those before
""",
    """
        if True:
""",
    PLANNER + "test_all_steps_since_a_plan_settled_say_how_long_a_step_takes[3]",
)

WATCH = "unit/test_watch.py::"

watch = table_of("planning/watch.py", MUTATIONS)

watch(
    "a new plan has been followed for long",
    """
        self._drift = drift
        self.num_followed = 0
""",
    """
        self._drift = drift
""",
    WATCH + "test_a_new_plan_settles_before_it_is_judged",
)
watch(
    "a new plan is judged by what the last one led to",
    """
        self.recent.clear()
        self.take()
""",
    """
        self.recent.clear()
""",
    WATCH + "test_a_new_plan_starts_without_reasons",
)
watch(
    "what steps took under the last plan counts",
    """
        self.recent.clear()
""",
    "",
    WATCH + "test_what_steps_take_is_remembered_once_they_settled",
)
watch(
    "steps that settle count",
    """
        if self.num_followed > _SETTLING_STEPS:
""",
    """
        self.recent.append(step)
        if self.num_followed > _SETTLING_STEPS:
""",
    WATCH + "test_what_steps_take_is_remembered_once_they_settled",
)
watch(
    "steps of other sizes are compared with the plan",
    """
            if not self._drift.is_comparable(step):
                return
""",
    "",
    WATCH + "test_steps_of_other_sizes_show_nothing_of_what_the_plan_led_to",
)
watch(
    "where sizes vary each smaller one is planned for as soon as the first",
    """
            self._patient_steps = {**dict.fromkeys(Reason, 0), Reason.SMALLER: with_smaller}
""",
    """
            self._patient_steps = dict.fromkeys(Reason, 0)
""",
    WATCH + "test_where_sizes_vary_smaller_ones_are_planned_for_more_and_more_rarely",
)
watch(
    "what was noticed between is forgotten",
    """
            self._found[reason] = self._found[reason] or found
""",
    """
            self._found[reason] = found
""",
    WATCH + "test_what_was_found_is_told_once",
)
watch(
    "what was found is told again and again",
    """
        found, self._found = self._found, dict.fromkeys(Reason, "")
""",
    """
        found = self._found
""",
    WATCH + "test_what_was_found_is_told_once",
)
watch(
    "too much memory is not noticed",
    """
        self._note(Reason.OVER, self._drift.over_budget(step))
""",
    """
""",
    WATCH + "test_too_much_memory_is_found_at_once",
)
watch(
    "effects count before they may",
    """
            if with_effects:
""",
    """
            if True:
""",
    WATCH + "test_effects_count_where_they_may",
)
watch(
    "what did not help is tried again at once",
    """
        if self.num_followed > self._patient_steps[reason]:
""",
    """
        if True:
""",
    WATCH + "test_what_did_not_help_is_a_reason_more_and_more_rarely",
)
watch(
    "patience never grows",
    """
            longer = max(2 * self._patient_steps[reason], _FIRST_PATIENCE_STEPS)
""",
    """
            longer = _FIRST_PATIENCE_STEPS
""",
    WATCH + "test_what_did_not_help_is_a_reason_more_and_more_rarely",
)
watch(
    "patience has no end",
    """
            self._patient_steps[reason] = min(longer, _MOST_PATIENT_STEPS[reason])
""",
    """
            self._patient_steps[reason] = longer
""",
    WATCH + "test_patience_has_an_end",
)
watch(
    "patience with one thing is patience with all",
    """
        if self.num_followed > self._patient_steps[reason]:
""",
    """
        if self.num_followed > max(self._patient_steps.values()):
""",
    WATCH + "test_patience_with_one_reason_is_none_with_another",
)
watch(
    "a plan that helped is not trusted",
    """
            self._patient_steps = {**dict.fromkeys(Reason, 0), Reason.SMALLER: with_smaller}
        elif reason is not None:
""",
    """
            pass
        elif reason is not None:
""",
    WATCH + "test_a_plan_that_helps_ends_the_patience",
)
watch(
    "plans take turns as long as what they do is not expected",
    """
        if changed and reason in (None, Reason.OVER, Reason.CAUSE):
""",
    """
        if changed:
""",
    WATCH + "test_a_plan_for_an_effect_may_change_nothing",
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
    return dataclasses.replace(profile, transient_bytes=max(peak_bytes - held_bytes, 0))
""",
    """
    return profile
""",
    CALIBRATION + "test_the_simulation_shows_what_was_measured",
)
calibration(
    "memory beside the activations is less than none",
    """
    return dataclasses.replace(profile, transient_bytes=max(peak_bytes - held_bytes, 0))
""",
    """
    return dataclasses.replace(profile, transient_bytes=peak_bytes - held_bytes)
""",
    CALIBRATION
    + "test_less_memory_than_simulated_is_taken_from_working_memory_as_far_as_there_is_some",
)
calibration(
    "fragments are as many as they were taken to be",
    """
    if held_bytes > peak_bytes:
""",
    """
    if False:
""",
    CALIBRATION + "test_less_memory_than_fragments_would_take_shows_that_there_are_fewer",
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

FILE = "unit/test_shared_plan_file.py::"

shared_plan_file = table_of("planning/shared_plan_file.py", MUTATIONS)

shared_plan_file(
    "a rank keeps to itself that it cannot follow the plan",
    """
        raise_first(message for _, message in told)
""",
    """
        raise_first([message])
""",
    FILE + "test_what_another_rank_cannot_follow_this_one_does_not_either",
)
shared_plan_file(
    "ranks without the file measure while others follow it",
    """
        if len({found for found, _ in told}) > 1:
""",
    """
        if False:
""",
    FILE + "test_a_file_that_some_ranks_see_is_refused_by_all[True]",
)
shared_plan_file(
    "ranks may follow different files",
    """
            check_same(plan, self._agreement)
""",
    """
            pass
""",
    FILE + "test_a_file_that_is_another_one_on_another_machine_is_refused",
)
shared_plan_file(
    "a place that no file can have is found out after the first plan",
    """
                check_place(self.path)
""",
    """
                pass
""",
    FILE + "test_a_place_that_does_not_exist_is_refused_by_who_writes_there[the writer]",
)
shared_plan_file(
    "every rank must be able to write where one does",
    """
        return self._stage.speaks and self._stage.layout.stage == 0
""",
    """
        return True
""",
    FILE + "test_a_place_that_does_not_exist_is_refused_by_who_writes_there[another stage]",
)
shared_plan_file(
    "all ranks of a stage write its plan",
    """
        if self._stage.speaks:
""",
    """
        if True:
""",
    FILE + "test_one_rank_of_a_stage_updates_its_plan[False]",
)
shared_plan_file(
    "a full disk stops the training when a plan is made",
    """
        except OSError as error:
            logger.warning("activation offload: the plan could not be written: %s", error)
""",
    """
        finally:
            pass
""",
    FILE + "test_a_plan_that_cannot_be_written_stops_no_training",
)
shared_plan_file(
    "a full disk stops the training when a plan takes the place of another",
    """
            with contextlib.suppress(ConfigurationError, OSError):  # said when the first was made
""",
    """
            if True:
""",
    FILE + "test_a_plan_that_cannot_be_written_stops_no_training",
)
shared_plan_file(
    "a stage follows a plan that it cannot",
    """
        self._stage.check(plans[stage], tiers, self.path)
""",
    "",
    FILE + "test_a_plan_for_a_tier_that_is_not_there_is_refused",
)
