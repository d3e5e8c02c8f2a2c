# SPDX-License-Identifier: Apache-2.0
"""Errors in the simulated step. Each makes machine code of its own, which takes some ten seconds.

Left out: a loop that waits for what never comes, for machine code cannot be told from a hang; a
read that is not urgent, which waits for itself.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

TIMELINE = "unit/test_timeline.py::"

simulation = table_of("placement/simulation.py", MUTATIONS)

simulation(
    "a pass begins before its input has arrived",
    """
        if arrives > figures[f.NOW]:
""",
    """
        if False:
""",
    TIMELINE + "test_a_stage_holds_as_many_micro_batches_as_come_before_its_first_backward",
)
simulation(
    "the backward pass before is not read ahead for",
    """
            f.prefetch(figures, pieces, channels, log, base, base + per_pass, opens)
""",
    """
            pass
""",
    TIMELINE + "test_before_the_loss_one_piece_has_to_do",
)
simulation(
    "the window is open before the loss too",
    """
            opens = chunk != stage.chunk_with_loss
""",
    """
            opens = True
""",
    TIMELINE + "test_before_the_loss_one_piece_has_to_do",
)
simulation(
    "working memory does not count",
    """
    result[PEAK_BYTES] = held_bytes + stage.figures[TRANSIENT_BYTES]
""",
    """
    result[PEAK_BYTES] = held_bytes
""",
    TIMELINE + "test_what_is_kept_costs_nothing_but_memory",
)
simulation(
    "what a step does outside of its passes takes no time",
    """
    result[STEP_S] += lag_s + stage.figures[STEP_FIXED_S]
""",
    """
    result[STEP_S] += lag_s
""",
    TIMELINE + "test_what_is_kept_costs_nothing_but_memory",
)
simulation(
    "a step ends with the own passes",
    """
    result[STEP_S] += lag_s + stage.figures[STEP_FIXED_S]
""",
    """
    result[STEP_S] += stage.figures[STEP_FIXED_S]
""",
    TIMELINE + "test_a_stage_holds_as_many_micro_batches_as_come_before_its_first_backward",
)
simulation(
    "micro-batches that are not simulated take no time",
    """
    if stage.figures[NUM_MORE] > 0:
""",
    """
    if False:
""",
    TIMELINE + "test_a_long_step_is_extrapolated",
)
simulation(
    "only reads are waited for",
    """
    sums[STALL_S] = figures[f.READ_WAIT] + figures[f.WRITE_WAIT]
""",
    """
    sums[STALL_S] = figures[f.READ_WAIT]
""",
    TIMELINE + "test_forward_waits_while_too_many_bytes_are_on_their_way",
)
simulation(
    "recomputation is not counted",
    """
                figures[f.RECOMPUTED] += amounts[at]
""",
    "",
    TIMELINE + "test_what_is_recomputed_costs_its_forward_again_and_holds_its_input",
)
simulation(
    "reads take nothing from writes",
    """
        channels[tier, f.SHARED_RATE] = min(write, max(shared - read, 0.0))
""",
    """
        channels[tier, f.SHARED_RATE] = write
""",
    TIMELINE + "test_while_a_read_is_under_way_a_write_has_what_is_left",
)

flow = table_of("placement/flow.py", MUTATIONS)

flow(
    "a full tier takes more",
    """
            if channels[channel, USED_BYTES] + size <= channels[channel, CAPACITY_BYTES]:
""",
    """
            if True:
""",
    TIMELINE + "test_a_full_tier_keeps_the_rest_in_memory",
)
flow(
    "space of what was read back is lost",
    """
        channels[int(pieces[piece, TIER]), USED_BYTES] -= pieces[piece, BYTES]
""",
    """
        pass
""",
    TIMELINE + "test_space_of_what_came_back_is_used_again",
)
flow(
    "space of what was written for nothing is lost",
    """
    channels[channel, USED_BYTES] -= size  # nobody will read it
""",
    """
    channels[channel, USED_BYTES] -= 0
""",
    TIMELINE + "test_space_of_what_was_written_for_nothing_is_used_again",
)
flow(
    "what is needed before its write begins is written",
    """
        if pieces[piece, STATE] == QUEUED:  # else it was needed meanwhile
""",
    """
        if True:
""",
    TIMELINE + "test_a_layer_that_is_used_at_once_is_not_moved",
)
flow(
    "transfers have no latency",
    """
    channels[channel, LEFT_BYTES] = size + latency_bytes
""",
    """
    channels[channel, LEFT_BYTES] = size
""",
    TIMELINE + "test_latency_is_for_each_storage",
)
flow(
    "transfers do not share a drive",
    """
    return channels[channel, RATE] if is_alone else channels[channel, SHARED_RATE]
""",
    """
    return channels[channel, RATE]
""",
    TIMELINE + "test_while_a_read_is_under_way_a_write_has_what_is_left",
)
flow(
    "what was written stays in memory",
    """
        pieces[piece, STATE] = ON_TIER
        change_memory(figures, log, -size)
""",
    """
        pieces[piece, STATE] = ON_TIER
""",
    TIMELINE + "test_a_trace_adds_up_to_the_prediction",
)
flow(
    "what comes back takes no memory",
    """
    change_memory(figures, log, pieces[piece, BYTES])
""",
    "",
    TIMELINE + "test_a_trace_adds_up_to_the_prediction",
)
flow(
    "nobody waits for bytes on their way",
    """
    while figures[IN_FLIGHT] > 0 and figures[IN_FLIGHT] + size > figures[IN_FLIGHT_LIMIT]:
""",
    """
    while False:
""",
    TIMELINE + "test_forward_waits_while_too_many_bytes_are_on_their_way",
)
flow(
    "waits for room are not counted",
    """
    figures[WRITE_WAIT] += figures[NOW] - began
""",
    "",
    TIMELINE + "test_forward_waits_while_too_many_bytes_are_on_their_way",
)
flow(
    "waits for reads are not counted",
    """
    figures[READ_WAIT] += waited_s
""",
    "",
    TIMELINE + "test_backward_waits_for_exactly_what_the_read_lacks",
)
flow(
    "the window holds one piece",
    """
                wanted = 2 * figures[LARGEST] + figures[MISSING]
""",
    """
                wanted = figures[LARGEST] + figures[MISSING]
""",
    TIMELINE + "test_before_the_loss_one_piece_has_to_do",
)
flow(
    "what proved missing does not widen the window",
    """
                wanted = 2 * figures[LARGEST] + figures[MISSING]
""",
    """
                wanted = 2 * figures[LARGEST]
""",
    TIMELINE + "test_the_window_grows_by_what_proved_missing",
)
flow(
    "a write for nothing frees memory while it goes on",
    """
    if pieces[piece, STATE] == TAKEN_BACK:
        pieces[piece, STATE] = DROPPED  # the write holds the memory
        return
""",
    "",
    TIMELINE + "test_memory_goes_when_the_write_for_nothing_ends",
)

simulation(
    "an allocator has no fragments",
    """
    held_bytes = np.ceil(figures[f.PEAK] * (1 + stage.figures[ALLOCATOR_SLACK]))
""",
    """
    held_bytes = figures[f.PEAK]
""",
    TIMELINE + "test_fragments_are_a_part_of_what_is_held",
)

solver = table_of("placement/solver.py", MUTATIONS)
SOLVER = "unit/test_solver.py::"

solver(
    "a plan without a goal is made",
    """
    if budget_bytes is None and max_slowdown is None:
""",
    """
    if False:
""",
    SOLVER + "test_a_goal_that_makes_no_sense_is_refused",
)
solver(
    "a plan over the budget is no error",
    """
        raise self._infeasible()
""",
    """
        return chosen, cost
""",
    SOLVER + "test_a_budget_that_cannot_be_met_names_the_smallest_that_can",
)
solver(
    "a plan within the budget may be slower than allowed",
    """
                if cost.peak_bytes <= budget:
                    self._check_time(chosen, cost)
                    return chosen, cost
""",
    """
                if cost.peak_bytes <= budget:
                    return chosen, cost
""",
    SOLVER + "test_a_budget_and_a_slowdown_are_both_kept_or_refused",
)
solver(
    "the smallest budget depends on what was asked for",
    """
        search = Search(self._timeline, 2 * _MOST_EVENTS)
""",
    """
        search = self._search
""",
    SOLVER + "test_the_smallest_budget_is_the_same_whatever_was_asked_for_and_is_met",
)
solver(
    "any slowdown will do",
    """
            over = max(cost.step_s - limit_s, 0.0)
""",
    """
            over = 0.0
""",
    SOLVER + "test_the_least_memory_within_a_slowdown",
)
solver(
    "any amount of memory will do",
    """
            over = max(cost.peak_bytes - budget, 0.0)
""",
    """
            over = 0.0
""",
    SOLVER + "test_within_a_budget_the_plan_is_as_fast_as_the_best_of_all",
)
solver(
    "everything is kept whatever it takes",
    """
        if self._fastest.peak_bytes <= budget:
""",
    """
        if True:
""",
    SOLVER + "test_what_hides_moves_before_anything_is_recomputed",
)
# Left out: a part of a long step has the last word about memory. Its peak is that of the whole, see
# unit/test_timeline_properties.py.
solver(
    "the smallest plan is the fastest",
    """
    return cost.peak_bytes, cost.step_s
""",
    """
    return cost.step_s, cost.peak_bytes
""",
    SOLVER + "test_a_budget_that_cannot_be_met_names_the_smallest_that_can",
)
solver(
    "more is written where that is as fast",
    """
            return over, step, cost.written_bytes, cost.peak_bytes
""",
    """
            return over, step, -cost.written_bytes, cost.peak_bytes
""",
    SOLVER + "test_of_plans_that_are_as_fast_the_one_that_writes_least_is_taken",
)
