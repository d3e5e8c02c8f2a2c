# SPDX-License-Identifier: Apache-2.0
"""Model states on tiers: what an optimizer keeps of each parameter, between its steps."""
