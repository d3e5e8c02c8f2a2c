# SPDX-License-Identifier: Apache-2.0
"""Several processes in one directory of frozen features: ranks that share, processes that die."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.offload.frozen.entry import decode
from tests.support.processes import finish, start_python
from tests.support.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

RANKS = Path(__file__).with_name("frozen_ranks.py")
ROWS_OF_A_RANK = 12


@pytest.mark.slow
def test_ranks_find_what_others_have_stored(tmp_path: Path) -> None:
    (features := tmp_path / "features").mkdir()
    found = {}
    for name, directory in (("without", "none"), ("with", features)):
        (folder := tmp_path / name).mkdir()
        found[name] = run_ranks(RANKS, folder, str(directory))
    for one, other in zip(found["with"], found["without"], strict=True):
        assert (one["losses"], one["weights"]) == (other["losses"], other["weights"])
        assert one["hits"] == [0, ROWS_OF_A_RANK, ROWS_OF_A_RANK]


# Forks a process for each training, which has imported torch already.
_KILLED = """
    import json, os, random, signal, sys, tempfile, time
    from pathlib import Path
    import torch
    from megatron.offload import cache_frozen
    from tests.support.frozen_training import train

    torch.set_num_threads(1)
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])

    def make():
        torch.manual_seed(0)
        tower = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh())
        return torch.nn.Sequential(tower.requires_grad_(False), torch.nn.Linear(4096, 2))

    def run(directory):
        torch.manual_seed(1)
        rows = {"input": torch.randn(36, 64)}
        return train(make(), rows, directory, loss_of=torch.sum, batch=6)

    def forked(work):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            work(lambda result: os.write(writing, json.dumps(result).encode()))
            os._exit(0)
        os.close(writing)
        return pid, reading

    def answer_of(directory):
        def work(tell):
            trained = run(directory)
            tell([trained.losses, trained.weights.sum().item(), trained.hits])
        pid, reading = forked(work)
        with open(reading, "rb") as pipe:
            answer = json.loads(pipe.read())
        os.waitpid(pid, 0)
        return answer

    began_s = time.perf_counter()
    wanted = answer_of(None)
    lasts_s = time.perf_counter() - began_s
    chance = random.Random(7)
    found = []
    for number in range(num_kills):
        directory = folder / str(number)
        directory.mkdir()
        pid, reading = forked(lambda tell: run(directory))
        os.close(reading)
        time.sleep(chance.uniform(0.1, 1.0) * lasts_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        files = [path for path in directory.rglob("*") if path.is_file()]
        losses, weights, hits = answer_of(directory)
        found.append([len(files), [losses, weights] == wanted[:2], hits])
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_whole_files_or_none(tmp_path: Path) -> None:
    """50 times, at random moments: the next run is right, and finds what is there."""
    code, output, errors = finish(start_python(_KILLED, tmp_path, 50), timeout_s=280)
    assert code == 0, errors
    found = json.loads(output)
    assert len(found) == 50
    assert all(is_same for _, is_same, _ in found)
    assert all(hits[1] == 36 for *_, hits in found)  # from its second epoch on at the latest
    counts = [count for count, *_ in found]
    assert any(0 < count < 36 for count in counts)  # some died in the middle
    assert any(hits[0] for *_, hits in found)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            decode(bytearray(path.read_bytes()))
