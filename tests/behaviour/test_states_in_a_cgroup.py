# SPDX-License-Identifier: Apache-2.0
"""With less memory than optimizer states need: killed with them in memory, trained on the SSD."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from check.states_in_a_cgroup import IN_MEMORY, ON_SSD, CheckError, Run, holds, main, memory_group

from megatron.offload.sizes import MIB

KILLED = Run(IN_MEMORY, MIB, killed=True)
TRAINED = Run(ON_SSD, MIB, killed=False, peak_bytes=MIB, step_s=1.0, weights="a")
FREE = dataclasses.replace(TRAINED, states=IN_MEMORY, limit_bytes=None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_memory_trained_on_the_ssd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with memory_group(1 << 40):
            pass
    except CheckError as error:
        pytest.skip(str(error))
    size = ["--hidden", "1024", "--layers", "24", "--window", "16MiB", "--steps", "2"]
    result = tmp_path / "result.json"
    assert main([*size, "--dir", str(tmp_path), "--json", str(result)]) == 0
    values = json.loads(result.read_text())
    assert [one["killed"] for one in values["runs"]] == [False, True, False]
    assert "killed for memory" in capsys.readouterr().out


def test_only_the_run_with_states_in_memory_is_killed_and_the_weights_are_the_same() -> None:
    assert holds([FREE, KILLED, TRAINED])
    assert not holds([FREE, dataclasses.replace(KILLED, killed=False, weights="a"), TRAINED])
    assert not holds([FREE, KILLED, dataclasses.replace(TRAINED, killed=True)])
    assert not holds([FREE, KILLED, dataclasses.replace(TRAINED, weights="b")])
