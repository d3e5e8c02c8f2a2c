# SPDX-License-Identifier: Apache-2.0
"""Scripts that hold a promise against what happens: the solver's, the planner's, the tiers'."""
