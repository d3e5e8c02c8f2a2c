# SPDX-License-Identifier: Apache-2.0
"""Scripts that measure what parts of the engine and of the planner cost, and nothing else."""
