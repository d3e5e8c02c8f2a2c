# SPDX-License-Identifier: Apache-2.0
"""Planning while a run trains, and again when it changes."""
