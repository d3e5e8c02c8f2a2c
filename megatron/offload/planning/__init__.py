# SPDX-License-Identifier: Apache-2.0
"""Measuring a run, planning from what was measured, and noticing when that no longer holds."""
