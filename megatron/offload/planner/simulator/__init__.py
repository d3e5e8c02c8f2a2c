# SPDX-License-Identifier: Apache-2.0
"""A step of one stage, simulated."""
