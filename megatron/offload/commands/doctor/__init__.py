# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload doctor`: what this machine has, whether it suffices, what to do if not."""
