# SPDX-License-Identifier: Apache-2.0
"""Sizes, flags and the errors of bad values."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from megatron.offload import ConfigurationError, OffloadConfig
from megatron.offload.layer_set import LayerSet
from megatron.offload.sizes import format_size, parse_budget, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        ("2kib", 2048),
        ("12G", 12 << 30),  # Slurm's and Docker's
        ("64k", 64 << 10),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 apple", "1MiB2", "0x10", "1e9"])
def test_what_is_not_a_size_says_so(text):
    with pytest.raises(ConfigurationError, match="is not a size; write"):
        parse_size(text)


def test_sizes_for_people():
    assert [format_size(n) for n in (0, 1000, 1536, 3 << 20, 5 << 29, 900 << 40)] == [
        "0 B", "1000 B", "1.5 KiB", "3 MiB", "2.5 GiB", "900 TiB",
    ]  # fmt: skip


def parse(*argv: str) -> OffloadConfig:
    parser = argparse.ArgumentParser()
    OffloadConfig.add_arguments(parser)
    return OffloadConfig.from_args(parser.parse_args(argv))


def test_every_field_has_a_flag_and_the_defaults_agree():
    assert parse() == OffloadConfig()
    for spec in dataclasses.fields(OffloadConfig):
        assert spec.metadata["flag"].startswith("--activation-")
        assert len(spec.metadata["help"]) > 30


def test_flags_reach_the_config():
    config = parse(
        "--activation-offload", "ssd", "--activation-offload-dir", "/a",
        "--activation-offload-min-bytes", "4KiB", "--activation-offload-threads", "2",
        "--activation-offload-inflight", "1GiB",
    )  # fmt: skip
    assert config == OffloadConfig(
        mode="ssd", directories=(Path("/a"),), min_bytes=4096, threads=2, inflight_bytes=1 << 30
    )


def test_a_chunked_loss_is_off_unless_it_is_asked_for():
    off, auto = OffloadConfig(), parse("--activation-chunked-loss", "auto")
    tokens = OffloadConfig.from_settings({"chunked_loss": "256"})
    assert [one.chunks_loss for one in (off, auto, tokens)] == [False, True, True]
    assert [one.chunk_tokens for one in (auto, tokens)] == [None, 256]
    assert tokens == OffloadConfig(chunked_loss=256)
    assert OffloadConfig.flags_of({"chunked_loss": 256}) == ["--activation-chunked-loss", "256"]
    for value in (True, 0, "some"):
        with pytest.raises(ConfigurationError, match="neither off, auto nor a number of tokens"):
            OffloadConfig(chunked_loss=value)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--activation-offload-min-bytes", "big"], "'big' is not a size"),
        (["--activation-offload-threads", "0"], "the smallest value is 1"),
        (["--activation-offload-threads", "many"], "'many' is not a whole number"),
        (["--activation-offload", "tape"], "invalid choice: 'tape'"),
    ],
)
def test_bad_values_end_with_exit_code_2(argv, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        parse(*argv)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"mode": "ssd"}, "needs a place on an SSD"),
        ({"mode": "dvd"}, "choose one of off, keep, ssd, host, tiered"),
        ({"mode": "tiered"}, "tiered needs a place on an SSD"),
        ({"mode": "ssd", "directories": (Path("a"), Path("a"))}, "names a directory twice"),
        ({"inflight_bytes": 1}, "is below"),
        ({"memory_budget_bytes": 1 << 30}, "--activation-memory-budget is for .* auto"),
        ({"mode": "ssd", "directories": (Path("a"),), "max_slowdown": 0.1}, "slowdown is for"),
        ({"plan_file": Path("plan.json")}, "--activation-offload-plan is for"),
        ({"mode": "auto", "memory_budget_bytes": 0}, "leaves no memory to compute in"),
        ({"mode": "auto", "offload_layers": LayerSet.parse("1")}, "layers chooses layers"),
        ({"mode": "auto", "recompute_layers": LayerSet.parse("1")}, "layers chooses layers"),
    ],
)
def test_contradictions_are_refused(values, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        OffloadConfig(**values)


@pytest.mark.parametrize(
    ("text", "budget"), [("0.4", 0.4), ("1.0", 1.0), ("0", 0), ("1.5GiB", 3 << 29), ("4096", 4096)]
)
def test_a_budget_is_a_size_or_a_fraction(text, budget):
    assert parse_budget(text) == budget and type(parse_budget(text)) is type(budget)


@pytest.mark.parametrize("text", ["1.5", "-0.5", "half", "0.5.0"])
def test_what_is_neither_a_fraction_nor_a_size_is_refused(text):
    with pytest.raises(ConfigurationError):
        parse_budget(text)


def test_a_rate_is_a_size_a_second():
    assert parse_rate("500MB/s") == parse_rate("500MB") == 5e8
    with pytest.raises(ConfigurationError, match="lets nothing through"):
        parse_rate("0")


@pytest.mark.parametrize(
    ("values", "safe_mode"),
    [
        ({}, "host"),
        ({"directories": (Path("a"),)}, "ssd"),
        ({"directories": (Path("a"),), "host_budget": 1 << 20}, "tiered"),
        ({"host_budget": 0.5}, "host"),
    ],
)
def test_auto_uses_the_tiers_that_it_is_given(values, safe_mode):
    config = OffloadConfig(mode="auto", **values)
    assert config.safe_mode == safe_mode and config.plans
    assert config.uses_ssd is (safe_mode != "host")
    assert config.uses_host is (safe_mode != "ssd")


def test_what_the_planner_is_asked_for_comes_from_flags():
    config = parse(
        "--activation-offload", "auto", "--activation-memory-budget", "12GiB",
        "--activation-offload-max-slowdown", "0.02", "--activation-offload-plan", "plan.json",
    )  # fmt: skip
    assert config.memory_budget_bytes == 12 << 30 and config.max_slowdown == 0.02
    assert config.plan_file == Path.cwd() / "plan.json"


@pytest.mark.parametrize("text", ["-0.1", "much", "nan", "inf"])
def test_what_is_no_slowdown_says_so(text, capsys):
    with pytest.raises(SystemExit):
        parse("--activation-offload-max-slowdown", text)
    assert "is no slowdown; write" in capsys.readouterr().err


def test_settings_are_fields_by_name_and_text_is_read_as_a_flag_is():
    config = OffloadConfig.from_settings(
        {"mode": "tiered", "directories": "/a,/b", "min_bytes": "4KiB", "threads": 2}
    )
    assert config == OffloadConfig(
        mode="tiered", directories=(Path("/a"), Path("/b")), min_bytes=4096, threads=2
    )


def test_an_unknown_setting_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigurationError, match="no setting 'min_byte'; did you mean min_bytes"):
        OffloadConfig.from_settings({"min_byte": 1})


@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(),
        OffloadConfig(mode="ssd", directories=(Path("/a"), Path("/b")), min_bytes=1, threads=8),
        OffloadConfig(mode="host", host_budget=0.25, recompute_layers=LayerSet.parse("0-3,x.y.7")),
        OffloadConfig(mode="auto", max_slowdown=0.5, write_bytes_per_s=1e6, plan_file=Path("/p")),
    ],
    ids=["off", "ssd", "host", "auto"],
)
def test_flags_say_all_that_a_config_says(config):
    flags = OffloadConfig.flags_of(vars(config))
    assert OffloadConfig.from_flags(flags) == config


def test_a_sentence_about_flags_can_be_said_of_settings():
    said = OffloadConfig.in_settings("--activation-offload auto needs --activation-memory-budget")
    assert said == "mode auto needs memory_budget_bytes"
