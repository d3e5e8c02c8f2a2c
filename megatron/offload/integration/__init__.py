# SPDX-License-Identifier: Apache-2.0
"""Who calls the engine."""
