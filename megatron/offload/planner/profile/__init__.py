# SPDX-License-Identifier: Apache-2.0
"""What is measured of a step, and the profile that is made of it."""
