# SPDX-License-Identifier: Apache-2.0
"""The best plan for a stage."""
