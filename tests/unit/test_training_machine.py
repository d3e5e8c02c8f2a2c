# SPDX-License-Identifier: Apache-2.0
"""The facts that stand beside measured figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts


def test_a_device_that_the_cpu_runtime_counts_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = machine_facts(tmp_path)
    assert facts["gpu"] is None and facts["cores"] >= 1
    assert facts["torch"] == torch.__version__ and in_a_line(facts).startswith(facts["cpu"])
