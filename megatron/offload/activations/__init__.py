# SPDX-License-Identifier: Apache-2.0
"""What autograd saves: its record, its placement, its way to a tier and back."""
