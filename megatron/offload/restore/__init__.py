# SPDX-License-Identifier: Apache-2.0
"""How an activation comes back in time for the backward pass."""
