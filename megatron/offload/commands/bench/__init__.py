# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload bench`: bandwidth and processor time of the storage tiers, beside fio's.

Reading order: sample (one timed piece), fio and memcpy (what the tiers are compared with), load (a
tier at work), point (rounds and ratios), text and picture, arguments, command.
"""
