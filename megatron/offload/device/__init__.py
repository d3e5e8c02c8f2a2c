# SPDX-License-Identifier: Apache-2.0
"""The memory that computes."""
