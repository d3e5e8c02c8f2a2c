# SPDX-License-Identifier: Apache-2.0
"""A drive fails while what it holds is shown, mapped: a sentence, and never other bits.

Mapped memory cannot answer with an error. So our own reads of what is shown, and the values that
are loaded, go through ordinary memory; where other code touches a mapping whose file fails, the
process ends and says why. Each test has a file that others cut short: its pages are gone, as on a
drive that fails.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload.errors import LostStateError
from megatron.offload.states.in_files import InFiles
from megatron.offload.tiers import bus_error
from tests.support.beneath import beneath
from tests.support.processes import finish, start_python
from tests.support.streams import (
    FROZEN,
    LAYERS,
    PARAMETERS,
    STATES,
    Training,
    assert_same,
    without_offload,
)
from tests.unit.test_in_files import is_in_a_file

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_compute_thread")]

LOST = rf"parameters: those of unit 1 of {LAYERS} .* could not be read back"


def cut(training: Training) -> None:
    """Cuts the files of a training short."""
    for drive in training.drives:
        os.truncate(f"/proc/self/fd/{drive.file.fd}", 0)


def shown(training: Training) -> list[torch.Tensor]:
    """What the stream shows a script of what is on its drives."""
    if training.stream == PARAMETERS:
        found = list(training.model.blocks.state_dict().values())
    else:
        states = training.optimizer.state_dict()["state"].values()
        found = [one for state in states for one in state.values() if one.dim()]
    return found


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Training]:
    training = Training(PARAMETERS, tmp_path).train(0)
    training.evaluate()
    yield training
    training.close(restore=False)


# -- What other code touches ----------------------------------------------------------------------

# Imports once, and forks for each way: a process that has imported torch and has no threads.
_EACH_WAY = """
    import faulthandler, io, json, os, sys, tempfile, threading, time, types
    from pathlib import Path
    import torch
    from tests.behaviour.test_mapped_files_that_fail import cut, shown
    from megatron.offload.tiers import bus_error
    from tests.support.streams import Training

    def touch(tensors, way):
        if way == "written":
            tensors[0].mul_(0.5)
        elif way == "read by numpy":
            tensors[0].numpy().sum()
        elif way == "read by threads":
            threads = [threading.Thread(target=one.sum) for one in tensors]
            for one in threads: one.start()
            for one in threads: one.join()
        elif way == "read by threads, and one takes long to say it":
            write = os.write
            def late(fd, text):
                time.sleep(0.5)  # the other thread is in its handler by then
                return write(fd, text)
            bus_error.os = types.SimpleNamespace(write=late)
            threads = [threading.Thread(target=tensors[0].sum) for _ in range(2)]
            for one in threads: one.start()
            for one in threads: one.join()
        elif way != "sent by another process":
            torch.save(tensors, io.BytesIO())
        else:
            os.kill(os.getpid(), 7)

    def train_and_touch(stream, way):
        if way == "faulthandler":
            faulthandler.enable()
        training = Training(stream, Path(sys.argv[1])).train(0)
        training.evaluate()
        tensors = shown(training)
        going, told = os.pipe()
        writer = os.fork() if way == "saved by a forked process" else None
        if writer == 0:
            os.read(going, 1)
            touch(tensors, way)
            os._exit(0)
        cut(training)
        if writer is None:
            touch(tensors, way)
        else:
            os.write(told, b" ")
            os.kill(os.getpid(), os.WTERMSIG(os.waitpid(writer, 0)[1]))

    ends = []
    for stream in ("optimizer states", "parameters"):
        for way in sys.argv[2:]:
            with tempfile.TemporaryFile() as errors:
                child = os.fork()
                if not child:
                    os.dup2(errors.fileno(), 2)
                    train_and_touch(stream, way)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                errors.seek(0)
                said = errors.read().decode()
            ends.append((stream, way, os.waitstatus_to_exitcode(status), said))
    print(json.dumps(ends))
"""
_SENT = "sent by another process"
_WAYS = (
    "saved",
    "written",
    "read by numpy",
    "read by threads",
    "read by threads, and one takes long to say it",
    "saved by a forked process",
    "faulthandler",
    _SENT,
)


@pytest.mark.slow
def test_the_process_ends_with_a_sentence(tmp_path: Path) -> None:
    code, output, errors = finish(start_python(_EACH_WAY, tmp_path, *_WAYS))
    assert code == 0, errors
    ends = json.loads(output)
    assert len(ends) == 2 * len(_WAYS)
    for stream, way, ended, said in ends:
        assert ended == -signal.SIGBUS, (stream, way, said)
        sentences = [line for line in said.splitlines() if "while they were shown" in line]
        assert len(set(sentences)) == len(sentences), (stream, way, said)
        assert bool(sentences) is (way != _SENT), (stream, way, said)
        for sentence in sentences:
            assert sentence.startswith(f"{stream}: ") and f"file in {tmp_path}, offset" in sentence
            assert "SIGBUS" in sentence and "resume from the last checkpoint" in sentence
        has_trace = "Fatal Python error: Bus error" in said
        assert has_trace is (way == "faulthandler"), (stream, way, said)


def test_what_a_library_gathers_for_a_checkpoint_has_a_sentence(tmp_path: Path) -> None:
    script = """
        import os, sys
        import torch
        from megatron.offload.states.in_files import InFiles
        from megatron.offload.tiers import mapped

        opened = []
        dup = os.dup
        whole = mapped._Mapping.add

        def add(self, address, one):
            opened.append(dup(one.fd))
            whole(self, address, one)

        mapped._Mapping.add = add
        with InFiles([sys.argv[1]], 4096):
            gathered = torch.zeros(4096)
        os.ftruncate(opened[0], 0)
        print("cut", flush=True)
        gathered.sum()
    """
    code, output, errors = finish(start_python(script, tmp_path))
    assert (code, output) == (-signal.SIGBUS, "cut\n"), errors
    sentence = f"optimizer states: those on their way to a checkpoint (file in {tmp_path}) could"
    assert sentence in errors


def test_a_mapping_that_is_gone_has_no_sentence(tmp_path: Path) -> None:
    before = set(bus_error._sentences)
    with InFiles([tmp_path], 4096):
        gathered = torch.zeros(4096)
    assert set(bus_error._sentences) > before
    del gathered
    assert set(bus_error._sentences) == before


# -- Where nothing can be mapped ------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, -1], ids=["once", "for ever"])
@pytest.mark.parametrize("refused", ["open", "dup"])
@pytest.mark.parametrize("stream", [STATES, PARAMETERS])
def test_without_a_file_descriptor_what_is_shown_is_in_memory(
    stream: str,
    refused: str,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process has as many files open as it may: the file of the tier cannot be opened again."""
    training = Training(stream, tmp_path).train(0)
    training.evaluate()
    call, left, num_files = getattr(os, refused), [times], len(os.listdir("/proc/self/fd"))

    def refuse(what: Any, *args: Any) -> int:
        if left[0] and (refused == "dup" or str(what).startswith("/proc/self/fd/")):
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        opened: int = call(what, *args)
        return opened

    monkeypatch.setattr(os, refused, refuse)
    assert_same(training.outcome(), without_offload(stream, 0))
    assert left[0] == 0 or left[0] < -1
    said = [one for one in caplog.messages if "Too many open files" in one]
    assert len(said) == (stream == STATES) and all("in memory until" in one for one in said)
    training.train(1)
    training.evaluate()
    assert_same(training.outcome(), without_offload(stream, 0, 1))
    training.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < num_files


# -- What we read, and what is loaded -------------------------------------------------------------


def test_states_that_were_not_replaced_are_lost_with_a_sentence(tmp_path: Path) -> None:
    training = Training(STATES, tmp_path).train(0)
    held = shown(training)
    state = next(iter(training.optimizer.state.values()))
    state["exp_avg"] = torch.ones_like(state["exp_avg"])
    cut(training)
    for _ in range(2):  # the second time as well
        with pytest.raises(LostStateError, match=r"optimizer states: those of .* short read"):
            training.train(1)
    del held
    with pytest.raises(LostStateError):
        training.close()


def test_states_beside_replaced_ones_keep_what_was_changed_through_data(tmp_path: Path) -> None:
    def train(directory: Path | None) -> dict[str, torch.Tensor]:
        training = Training(STATES, directory).train(0)
        shown(training)
        for state in training.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5
            state["exp_avg_sq"].data.mul_(2)
        outcome = training.train(1).outcome()
        training.close(restore=False)
        return outcome

    assert_same(train(tmp_path), train(None))


def test_states_that_are_loaded_whole_need_nothing_of_the_file(tmp_path: Path) -> None:
    training = Training(STATES, tmp_path).train(0)
    saved = training.checkpoint()
    cut(training)
    training.load(saved)
    assert_same(training.train(1).outcome(), without_offload(STATES, 0, 1))
    training.close()


@pytest.mark.parametrize("is_changed", [False, True], ids=["replaced", "changed too"])
def test_parameters_that_were_not_replaced_are_lost_with_a_sentence(
    is_changed: bool, made: Training
) -> None:
    block = made.model.blocks[0]
    block.up.weight.data = torch.ones_like(block.up.weight)
    if is_changed:
        with torch.no_grad():
            block.down.weight.mul_(2)
    cut(made)
    with pytest.raises(LostStateError, match=LOST):
        made.train(1)


def test_parameters_that_were_changed_in_place_are_lost_with_a_sentence(made: Training) -> None:
    with torch.no_grad():
        made.model.blocks[0].down.weight.mul_(2)
    cut(made)
    with pytest.raises(LostStateError, match=LOST):
        made.train(1)


@pytest.mark.parametrize("is_shown", [False, True], ids=["away", "shown"])
def test_parameters_are_loaded_in_ordinary_memory_a_unit_at_a_time(
    is_shown: bool, made: Training, tmp_path: Path
) -> None:
    saved = {name: 2 * one for name, one in made.model.state_dict().items()}
    made.evaluate()
    if is_shown:
        made.handle.expose()
    seen: list[str] = []
    window = made.handle.window

    def look(module: torch.nn.Module, _: Any, prefix: str, *__: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            seen.append(prefix + name)
            assert not is_in_a_file(param, tmp_path)
            assert window.memory_bytes <= 2 * max(unit.num_bytes for unit in window.units)

    for module in made.model.blocks.modules():
        module.register_load_state_dict_pre_hook(look)
    made.model.load_state_dict(saved)
    assert len(seen) == len(list(made.model.blocks.parameters()))
    for name, one in made.model.state_dict().items():
        assert torch.equal(one, saved[name]), name
    made.evaluate()
    for name, one in made.model.state_dict().items():
        assert torch.equal(one, saved[name]), name


@pytest.mark.parametrize("is_shown", [False, True], ids=["away", "shown"])
@pytest.mark.parametrize("stream", [PARAMETERS, FROZEN])
def test_parameters_that_are_loaded_whole_need_nothing_of_the_file(
    stream: str, is_shown: bool, tmp_path: Path
) -> None:
    training = Training(stream, tmp_path).train(0)
    saved = training.checkpoint()
    training.evaluate()
    if is_shown:
        training.handle.expose()
    cut(training)
    if not is_shown:
        with pytest.raises(LostStateError, match="could not be read back"):
            training.train(1)
    training.load(saved)
    assert_same(training.train(1).outcome(), without_offload(stream, 0, 1))
    training.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_parameters_of_which_a_part_is_loaded_are_lost_with_a_sentence(
    at_once: bool, made: Training
) -> None:
    """Said by the load if it goes on to other units, and by whatever uses the unit after it."""
    saved = {name: one.clone() for name, one in made.model.state_dict().items()}
    made.evaluate()
    cut(made)
    block, left = made.model.blocks[0], "up.weight"
    part = {n: saved[f"blocks.0.{n}"] for n, _ in block.named_parameters() if n != left}
    if at_once:
        block.load_state_dict(part, strict=False)
    else:
        with pytest.raises(LostStateError, match=LOST):
            made.model.load_state_dict(saved | {f"blocks.0.{left}": torch.ones(1)}, strict=False)
    assert beneath(block.up.weight).isnan().all()
    uses: list[Callable[[], Any]] = [
        functools.partial(copy.deepcopy, block),
        functools.partial(pickle.dumps, block),
        functools.partial(made.train, 1),
        made.evaluate,
        block.state_dict,
        made.handle.expose,
    ]
    for use in uses:
        with pytest.raises(LostStateError, match=LOST):
            use()
    if at_once:
        block.load_state_dict({left: saved[f"blocks.0.{left}"]}, strict=False)
    made.model.load_state_dict(saved)
    for name, one in made.model.state_dict().items():
        assert torch.equal(one, saved[name]), name


def test_units_of_which_nothing_is_loaded_do_not_move(made: Training) -> None:
    saved = {name: one.clone() for name, one in made.model.blocks[1].state_dict().items()}
    made.evaluate()
    before = made.model.blocks[1].up.weight.clone()
    made.evaluate()
    written = made.written_bytes
    made.model.load_state_dict({f"blocks.1.{n}": 3 * one for n, one in saved.items()}, strict=False)
    made.evaluate()
    assert made.written_bytes - written == made.handle.window.units[1].num_bytes
    assert torch.equal(made.model.blocks[1].up.weight, 3 * before)


@pytest.mark.parametrize("restore", [False, True])
def test_what_was_shown_and_is_lost_is_nan_after_closing(restore: bool, made: Training) -> None:
    block, drives = made.model.blocks[0], made.drives
    with torch.no_grad():
        block.down.weight.mul_(2)
    cut(made)
    with pytest.raises(LostStateError, match=LOST) if restore else contextlib.nullcontext():
        made.handle.close(restore=restore)
    assert block.up.weight.isnan().all() and type(block.up.weight) is torch.nn.Parameter
    assert all(drive.file.fd < 0 for drive in drives)
