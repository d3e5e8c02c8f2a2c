# SPDX-License-Identifier: Apache-2.0
"""The `report` command."""

from __future__ import annotations

import json

from megatron.offload import cli


def write_run(path, losses):
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for step, loss in enumerate(losses, start=1):
            record = {
                "step": step,
                "loss": loss,
                "step_time_s": step,
                "peak_activation_bytes": 1 << 20,
            }
            print(json.dumps({**record, "offload": {"written_bytes": 2048}}), file=file)
    return str(path)


def test_runs_are_compared_with_the_first(tmp_path, capsys):
    first = write_run(tmp_path / "a" / "m.jsonl", [3.0, 2.0, 1.0])
    same = write_run(tmp_path / "b" / "m.jsonl", [3.0, 2.0])
    other = write_run(tmp_path / "c" / "m.jsonl", [3.0, 2.0000000001])
    assert cli.main(["report", first, same, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "identical" in lines[2] and "differ from step 2" in lines[3]
    assert "2.500" in lines[1] and "1 MiB" in lines[1] and "2 KiB" in lines[1]


def test_the_last_loss_is_the_last_one_that_is_known(tmp_path, capsys):
    paths = [write_run(tmp_path / name / "m.jsonl", losses) for name, losses in LOGGED.items()]
    assert cli.main(["report", *paths]) == 0
    _, some, other, none = capsys.readouterr().out.splitlines()
    assert "2.0000" in some and "identical" in some
    assert "2.5000" in other and "differ from step 2" in other
    assert none.split()[:3] == ["none", "3", "-"]


LOGGED = {"some": [None, 2.0, None], "other": [None, 2.5, None], "none": [None] * 3}


def test_runs_in_one_folder_are_told_apart_by_their_files(tmp_path, capsys):
    names = ("a/off.jsonl", "a/ssd.jsonl", "b/off.jsonl")
    assert cli.main(["report", *(write_run(tmp_path / name, [1.0]) for name in names)]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["off.jsonl", "ssd.jsonl", "b"]


def test_a_run_without_a_step_is_a_row_of_dashes(tmp_path, capsys):
    empty = write_run(tmp_path / "a" / "m.jsonl", [])
    other = write_run(tmp_path / "b" / "m.jsonl", [1.0])
    assert cli.main(["report", empty, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["a", "0", "-"] and "identical" in lines[2]


TRAINING = """
import argparse, json
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--activation-offload", default="off")
for name in ("activation-offload-dir", "metrics-file", "lr", "eval-iters", "log-interval"):
    parser.add_argument("--" + name)
parser.add_argument("--train-iters", type=int)
args = parser.parse_args()
ssd = args.activation_offload == "ssd"
with open(args.metrics_file, "w") as file:
    for step in range(1, args.train_iters + 1):
        values = {"step": step, "loss": 1.5 + (ssd and args.lr == "2"), "step_time_s": 1.0}
        values["peak_activation_bytes"] = (1 if ssd else 4) << 20
        print(json.dumps({**values, "offload": {"written_bytes": 2048 * ssd}}), file=file)
"""


def compare(tmp_path, *words):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    offload = ("--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path))
    launch = ("N=1", "python", str(script), *offload, "--save", "nowhere", *words)
    return cli.main(["report", "--steps", "3", "--", *launch])


def test_a_training_command_is_run_without_our_flags_and_as_it_is(tmp_path, capsys):
    assert compare(tmp_path) == 0
    said = capsys.readouterr()
    without, with_offload = (line.split() for line in said.out.splitlines()[1:])
    assert without[:4] == ["off", "3", "1.5000", "identical"] and "4 MiB" in said.out
    assert with_offload[:4] == ["offload", "3", "1.5000", "identical"] and "2 KiB" in said.out
    assert "left out of what is run: --save nowhere\n" in said.err
    assert compare(tmp_path, "--lr", "2") == 0
    assert "differ from step 1" in capsys.readouterr().out


def test_a_training_command_that_cannot_be_compared_is_said_in_a_sentence(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such flag')")
    assert cli.main(["report", "--", "python", str(script), "--lr", "1"]) == 2
    assert "has no offload flag" in capsys.readouterr().err
    assert cli.main(["report", "--", str(script), "--activation-offload", "host"]) == 2
    assert "off ended with exit code 1" in capsys.readouterr().err
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    assert cli.main(["report", "--", str(script), "--activation-offload", "host"]) == 2
    assert "start one of Megatron-LM through -m megatron.offload.launch" in capsys.readouterr().err
    assert cli.main(["report", "--", "python", "--lr", "1"]) == 2
    assert "report finds no script" in capsys.readouterr().err


def test_what_is_no_run_ends_with_exit_code_2(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("hello\n")
    no_loss = tmp_path / "no_loss"
    no_loss.write_text('{"step": 1}\n')
    for path in (text, no_loss, tmp_path / "missing"):
        assert cli.main(["report", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
