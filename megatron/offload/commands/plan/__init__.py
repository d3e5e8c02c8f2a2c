# SPDX-License-Identifier: Apache-2.0
"""The command `megatron-offload plan`: what to expect of a run before it is started."""
