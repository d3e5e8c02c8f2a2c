# SPDX-License-Identifier: Apache-2.0
"""What `megatron-offload` does: doctor, plan, rok, report."""
