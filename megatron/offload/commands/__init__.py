# SPDX-License-Identifier: Apache-2.0
"""What `megatron-offload` does: doctor, bench, plan, rok, report."""
