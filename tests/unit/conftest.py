# SPDX-License-Identifier: Apache-2.0
"""What several unit tests ask for: tiers on drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.offload.tiers.ssd import SsdTier


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[Callable[..., SsdTier]]:
    """Builds tiers on directories of their own; closes those still open."""
    tiers: list[SsdTier] = []

    def build(num_drives: int = 1, **settings: object) -> SsdTier:
        directories = [tmp_path / f"{len(tiers)}-{number}" for number in range(num_drives)]
        for directory in directories:
            directory.mkdir()
        tiers.append(SsdTier(directories, **settings))  # type: ignore[arg-type]
        return tiers[-1]

    yield build
    for tier in tiers:
        if tier.drives[0].file.fd != -1:  # type: ignore[attr-defined]
            tier.close()
