# SPDX-License-Identifier: Apache-2.0
"""Every value of every setting is checked once, however it is given: text, number, path, `None`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fractions
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.offload import ConfigurationError, OffloadConfig
from megatron.offload.flag import Settings, destination
from megatron.offload.integration.torch.trainer_callback import TrainerOffload
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_set import LayerSet
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.sizes import MOST_BYTES
from megatron.offload.states.config import StatesConfig

KINDS: tuple[type[Any], ...] = (OffloadConfig, StatesConfig, ParametersConfig, LayerMajorConfig)
FIELDS = [(kind, spec.name) for kind in KINDS for spec in dataclasses.fields(kind)]


class Unwilling:
    """A value that says nothing of itself."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __fspath__ = __iter__ = __eq__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


WORDS = [
    *("", "off", "on", "auto", "ssd", "host", "tiered", "keep", "direct", "0", "1", "-1", "0.5"),
    *(
        "12GiB",
        "500MB/s",
        "nan",
        "inf",
        "-0.0",
        "1e9",
        "1,2",
        "~",
        "~nobody-of-this-name/x",
        "a\0b",
    ),
    *("a,,b", "9" * 400, "9" * 5000, "1." + "0" * 5000, "\ud800", "5-1", "1-8,12", "²", "٣"),
]
OTHERS = [
    *(None, True, False, Unwilling(), object(), b"ssd", b"\xff", [], [5], ["/a", "/b"], ("/a", 5)),
    *({}, {"a": 1}, {"/a"}, torch.tensor(5), torch.ones(3), np.ones(3), np.int64(5), 1j),
    *(
        np.float32(0.25),
        Decimal(5),
        fractions.Fraction(1, 3),
        fractions.Fraction(10**400),
        10**5000,
    ),
    *(
        Path("/a"),
        Path("a"),
        LayerSet.parse("1-4"),
        LayerSet(),
        range(3),
        int,
        lambda: 5,
        "x" * 9999,
    ),
]
ANYTHING = (
    st.sampled_from(WORDS)
    | st.sampled_from(OTHERS)
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.text() | st.integers(), max_size=3)
)


def made(kind: type[Settings], values: dict[str, Any]) -> Settings | str:
    """The config with these values, or the sentence that refuses it; any other error is raised."""
    try:
        return kind(**values)
    except ConfigurationError as error:
        return str(error)


# What the other fields are, so that most values are refused for themselves alone.
BASES: dict[type[Settings], dict[str, Any]] = {
    OffloadConfig: {"mode": "tiered", "directories": ("/a",), "min_bytes": 1},
    StatesConfig: {"mode": "tiered", "directories": ("/a",)},
    ParametersConfig: {"mode": "tiered", "directories": ("/a",)},
    LayerMajorConfig: {},
}


@given(field=st.sampled_from(FIELDS), value=ANYTHING)
def test_any_value_of_any_type_gives_a_config_or_a_sentence(
    field: tuple[type[Settings], str], value: Any
) -> None:
    kind, name = field
    config = made(kind, {**BASES[kind], name: value})
    if isinstance(config, str):
        assert config.startswith(kind.prefix) and len(config) < 1000
        return
    # What is in a config can be given again, in all ways, and says the same.
    values = {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(kind)}
    assert kind.from_settings(values) == dataclasses.replace(config) == config


@given(field=st.sampled_from(FIELDS), number=st.integers() | st.floats() | st.booleans())
def test_a_number_is_taken_or_refused_as_its_text_is(
    field: tuple[type[Settings], str], number: float
) -> None:
    kind, name = field
    (spec,) = (one for one in dataclasses.fields(kind) if one.name == name)
    if spec.metadata["choices"] or "path" in spec.metadata["parse"].__name__:
        return  # their text names something
    text = format(Decimal(repr(number)), "f") if isinstance(number, float) else str(number)
    by_number, by_text = (made(kind, {**BASES[kind], name: one}) for one in (number, text))
    if isinstance(number, bool):
        assert isinstance(by_text, str) and (number is False or isinstance(by_number, str))
    elif isinstance(by_text, str):
        assert isinstance(by_number, str)  # the same sentence, but for how the value is shown
        assert by_number.partition(": ")[0] == by_text.partition(": ")[0]
        assert by_number[-15:] == by_text[-15:]
    else:
        assert by_number == by_text and type(getattr(by_number, name)) is type(
            getattr(by_text, name)
        )


@given(field=st.sampled_from(FIELDS), text=st.sampled_from(WORDS))
def test_a_flag_takes_what_a_setting_takes(field: tuple[type[Settings], str], text: str) -> None:
    kind, name = field
    (spec,) = (one for one in dataclasses.fields(kind) if one.name == name)
    parser = argparse.ArgumentParser(exit_on_error=False)
    kind.add_arguments(parser)
    by_setting = made(kind, {**BASES[kind], name: text})
    try:
        parsed = parser.parse_args([f"{spec.metadata['flag']}={text}"])
    except argparse.ArgumentError as error:
        assert isinstance(by_setting, str)
        if not spec.metadata["choices"]:  # of these argparse has a sentence of its own
            assert str(error).partition(": ")[2] in by_setting
        return
    given_value = getattr(parsed, destination(spec))
    assert made(kind, {**BASES[kind], name: given_value}) == by_setting


@pytest.mark.parametrize(
    ("kind", "name", "value", "sentence"),
    [
        (OffloadConfig, "threads", 0, "--activation-offload-threads: 0 is not allowed; the smal"),
        (StatesConfig, "threads", 0, "--optimizer-state-threads: 0 is not allowed; the smallest"),
        (ParametersConfig, "threads", 0, "--parameter-offload-threads: 0 is not allowed; the sm"),
        (OffloadConfig, "threads", -3, "-3 is not allowed; the smallest value is 1"),
        (OffloadConfig, "threads", 10**6, "1000000 is not allowed; the largest value is 1024"),
        (OffloadConfig, "threads", 1.5, "1.5 is not a whole number"),
        (OffloadConfig, "threads", True, "True is not a whole number"),
        (OffloadConfig, "write_bytes_per_s", -1, "-1 is not a size"),
        (OffloadConfig, "write_bytes_per_s", 0, "0 lets nothing through"),
        (OffloadConfig, "write_bytes_per_s", float("nan"), "nan is not a size"),
        (OffloadConfig, "min_bytes", -1, "-1 is not a size"),
        (OffloadConfig, "min_bytes", None, "None is not a size"),
        (OffloadConfig, "min_bytes", "9" * 400, "is more than any disk or memory has"),
        (OffloadConfig, "min_bytes", 0.5, "0.5 is not a size: a byte has no parts"),
        (OffloadConfig, "pinned_bytes", -1, "-1 is not a size"),
        (OffloadConfig, "memory_budget_bytes", float("nan"), "nan is not a size"),
        (OffloadConfig, "max_slowdown", float("nan"), "nan is no slowdown"),
        (OffloadConfig, "host_budget", float("nan"), "nan is not a size"),
        (OffloadConfig, "host_budget", 1.5, "1.5 is neither a fraction nor a size"),
        (OffloadConfig, "recompute_layers", [5], "[5]' names no layers"),
        (OffloadConfig, "drive_endurance_bytes", 0, "0 is less than a byte"),
        (OffloadConfig, "directories", 5, "5 is no path"),
        (OffloadConfig, "directories", "", "a path is empty"),
        (OffloadConfig, "directories", "/a,", "a path is empty"),
        (OffloadConfig, "trace_file", "~nobody-of-this-name/x", "is no path that can be found"),
        (StatesConfig, "device_memory_budget_bytes", -1, "-1 is not a size"),
        (StatesConfig, "window_bytes", float("nan"), "nan is not a size"),
        (StatesConfig, "bucket_bytes", 0, "0 is less than a byte"),
        (LayerMajorConfig, "units", 0, "0 is neither off, auto nor a number of units"),
    ],
)
def test_what_a_field_may_not_have_is_refused_in_a_sentence(
    kind: type[Settings], name: str, value: Any, sentence: str
) -> None:
    refused = made(kind, {**BASES[kind], name: value})
    assert isinstance(refused, str) and sentence in refused
    # Whoever gave a setting reads its name.
    spoken = kind.in_settings(refused)
    assert spoken.startswith(kind.prefix) and "--" not in spoken.partition(";")[0]


def test_values_are_what_their_text_says() -> None:
    config = OffloadConfig(
        mode="ssd",
        directories=("/a", Path("/b")),  # type: ignore[arg-type]
        min_bytes="4KiB",  # type: ignore[arg-type]
        recompute_layers=5,  # type: ignore[arg-type]
        write_bytes_per_s=1e18,
        threads=np.int64(2),  # type: ignore[arg-type]
        chunked_loss=False,
        host_budget=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert config.directories == (Path("/a"), Path("/b")) and config.min_bytes == 4096
    assert config.recompute_layers == LayerSet.parse("5") and config.chunked_loss == "off"
    assert config.write_bytes_per_s == 1e18 and type(config.threads) is int
    assert config.host_budget == 0.5
    assert ParametersConfig(mode="host", gradients=True).gradients == "on"  # type: ignore[arg-type]
    assert OffloadConfig(min_bytes=MOST_BYTES, inflight_bytes=MOST_BYTES).min_bytes == MOST_BYTES
    with pytest.raises(ConfigurationError, match="more than any disk"):
        OffloadConfig(min_bytes=MOST_BYTES + 1)


def test_a_path_is_the_same_after_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = OffloadConfig(
        mode="ssd", directories=("d",), trace_file="trace.json", memory_report_file="report.jsonl"
    )  # type: ignore[arg-type]
    assert config.directories == (tmp_path / "d",)
    assert config.trace_file == tmp_path / "trace.json"
    assert config.memory_report_file == tmp_path / "report.jsonl"


@pytest.mark.parametrize("own", [{}, {"window_bytes": 0}])
def test_a_callback_keeps_the_directory_that_was_meant_when_it_was_made(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path)
    callback = TrainerOffload("d", optimizer_states=own or True)
    monkeypatch.chdir("/")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    callback.open(model, [optimizer], torch.device("cpu"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    callback.close()
    with pytest.raises(ConfigurationError, match="a path is empty"):
        TrainerOffload("")


def test_without_a_working_directory_a_relative_path_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with contextlib.chdir(gone):
        gone.rmdir()
        with pytest.raises(ConfigurationError, match=r"No such file or directory.*absolute"):
            OffloadConfig(directories=("d",))  # type: ignore[arg-type]


# -- Directories at the doors ---------------------------------------------------------------------

WITH_DIRECTORIES = [OffloadConfig, StatesConfig, ParametersConfig]


@pytest.mark.parametrize("kind", WITH_DIRECTORIES)
def test_a_door_takes_one_directory_or_several_and_chooses_the_mode(
    kind: type[Any], tmp_path: Path
) -> None:
    one, two = tmp_path / "one, with a comma", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
    for given_, real in [
        (str(one), (one,)),
        (one, (one,)),
        ([one, str(two)], (one, two)),
        (iter([two]), (two,)),
    ]:
        config = kind.of_door(given_, None, {})
        assert (config.mode, config.directories) == ("ssd", real)
    assert kind.of_door(None, None, {"directories": [two]}).mode == "ssd"
    assert kind.of_door(None, None, {}).mode == kind.of_door([], None, {}).mode == "host"
    with pytest.raises(ConfigurationError, match="directory and directories are the same"):
        kind.of_door(one, None, {"directories": (two,)})


@pytest.mark.parametrize("kind", WITH_DIRECTORIES)
def test_a_directory_is_resolved_once(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.chdir(tmp_path)
    assert kind.of_door("link", None, {}).resolved().directories == (real,)
    for same in ([real, link], [real, "real/../real"], [link, "link"]):
        with pytest.raises(ConfigurationError, match="names a directory twice"):
            kind.of_door(same, None, {}).resolved()


@pytest.mark.parametrize("kind", WITH_DIRECTORIES)
def test_what_cannot_be_reached_is_refused_in_a_sentence(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, reason in [
        ("absent", "does not exist"),
        ("file", "is not a directory"),
        ("file/below", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("n" * 300, "File name too long"),
        ("nul\0byte", "NUL byte"),
    ]:
        with pytest.raises(ConfigurationError, match=reason) as refused:
            kind.of_door(str(tmp_path / name), None, {}).resolved()
        assert str(refused.value).startswith(kind.prefix)
    for wrong, reason in [(5, "5 is no path"), ([5], "5 is no path"), ("", "a path is empty")]:
        with pytest.raises(ConfigurationError, match=f"directory: {reason}"):
            kind.of_door(wrong, None, {}).resolved()
    asked = os.stat

    def dead(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("dead"):
            raise OSError(107, "Transport endpoint is not connected")  # of FUSE; NFS's is alike
        return asked(path, **options)

    (tmp_path / "dead").mkdir()
    monkeypatch.setattr(os, "stat", dead)
    with pytest.raises(ConfigurationError, match=r"dead cannot be reached \(Transport endpoint"):
        kind.of_door(tmp_path / "dead", None, {}).resolved()
