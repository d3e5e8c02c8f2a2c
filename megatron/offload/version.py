# SPDX-License-Identifier: Apache-2.0
"""The version of the package, in the one place that has it; pyproject.toml reads it from here."""

from __future__ import annotations

__version__ = "0.1.0"
