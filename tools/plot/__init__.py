# SPDX-License-Identifier: Apache-2.0
"""Scripts that show: pictures of results that were measured, tables of what is projected."""
