# SPDX-License-Identifier: Apache-2.0
"""Steps that run each unit of layers for all micro-batches before the next unit."""
