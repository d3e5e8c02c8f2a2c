# SPDX-License-Identifier: Apache-2.0
"""Where bytes can be outside device memory, and how they get there."""
