# SPDX-License-Identifier: Apache-2.0
"""The patches only add lines, and the tool adds and removes them in all files or in none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import apply_patches
import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = sorted(path.parent for path in ROOT.glob("patches/*/sources.json"))
LAYER = "megatron/core/transformer/transformer_layer.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
INFO = "megatron/core/package_info.py"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A directory with the files of the installed megatron-core that matter to the tool."""
    specification = importlib.util.find_spec("megatron.core")
    assert specification is not None and specification.origin is not None
    installed = Path(specification.origin).parents[2]
    for file in (LAYER, SCHEDULES, INFO):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, tmp_path / file)
    return tmp_path


def contents(target: Path) -> dict[str, bytes]:
    """Every file below the target, those that the tool might leave behind among them."""
    paths = (path for path in target.rglob("*") if path.is_file())
    return {str(path.relative_to(target)): path.read_bytes() for path in paths}


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def run(action: str, target: Path, *more: str) -> int:
    return apply_patches.main([f"--{action}", str(target), *more])


def test_patches_add_few_lines_and_remove_none() -> None:
    assert VERSIONS
    for version in VERSIONS:
        num_added = 0
        for path in version.glob("*.patch"):
            _, _, body = path.read_text().partition("\n+++ b/")
            lines = body.splitlines()[1:]
            assert all(line.startswith(("+", "@@ ")) for line in lines), path
            num_added += sum(line.startswith("+") for line in lines)
        assert 0 < num_added < 150, version
        text = (ROOT / "patches" / "README.md").read_text()
        assert f"Lines are only added, {num_added} in all" in text
        for patch in apply_patches.read_patches(version):
            assert f"{patch.hashes[0]}  {patch.file}\n" in text


def test_a_patch_that_removes_a_line_or_has_context_is_not_read(tmp_path: Path) -> None:
    shutil.copytree(VERSIONS[0], tmp_path / "patches")
    patch = tmp_path / "patches" / "transformer_layer.patch"
    for line in ("-    @around_layer", "     @around_layer"):
        edit(patch, "+    @around_layer", line)
        with pytest.raises(ValueError, match=r"transformer_layer\.patch"):
            apply_patches.read_patches(tmp_path / "patches")
        edit(patch, f"\n{line}", "\n+    @around_layer")
    assert len(apply_patches.read_patches(tmp_path / "patches")) == 2


def test_applied_twice_is_applied_once_and_reverted_is_as_before(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(target)
    assert run("check", target) == 0 and contents(target) == before
    assert run("apply", target) == 0
    applied = contents(target)
    assert [file for file in applied if applied[file] != before.get(file)] != []
    assert applied.keys() == before.keys() and applied[INFO] == before[INFO]
    for file, decorators in ((LAYER, 1), (SCHEDULES, 3)):
        assert applied[file] != before[file]
        assert applied[file].count(b"@around_") == decorators
    capsys.readouterr()
    assert run("apply", target) == 0 and contents(target) == applied
    assert capsys.readouterr().out.count("patched already") == 2
    assert run("check", target) == 0
    assert run("revert", target) == 0 and contents(target) == before
    capsys.readouterr()
    assert run("revert", target) == 0 and contents(target) == before
    assert capsys.readouterr().out.count("not patched already") == 2


@pytest.mark.parametrize("command", ["git apply --unidiff-zero {}", "patch --quiet -p1 -i {}"])
def test_by_hand_gives_the_same_bytes(command: str, target: Path, tmp_path: Path) -> None:
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    for path in sorted(VERSIONS[0].glob("*.patch")):
        # The temporary directory may lie in somebody's checkout: git then goes by that.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        words = command.format(path).split()
        subprocess.run(words, cwd=target, env=environment, check=True, timeout=30)
    by_hand = contents(target)
    assert run("revert", target) == 0
    assert contents(target) != by_hand
    assert run("apply", target) == 0
    assert contents(target) == by_hand


def test_a_file_with_local_changes_needs_force_and_keeps_them(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(target / LAYER, '"""Get the index offset of', '"""Our index offset of')
    before = contents(target)
    assert run("check", target) == 1
    assert run("apply", target) == 2 and contents(target) == before
    message = capsys.readouterr().err.splitlines()[-1]
    assert LAYER in message and "--force" in message
    assert run("apply", target, "--force") == 0
    applied = contents(target)
    assert b"Our index offset of" in applied[LAYER] and b"@around_layer\n" in applied[LAYER]
    assert run("check", target) == 0
    assert run("apply", target) == 0
    assert run("revert", target) == 2 and contents(target) == applied
    assert run("revert", target, "--force") == 0 and contents(target) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (LAYER, "import functools\n", "import functools\nimport os\n"),  # the places have moved
        (LAYER, "    def forward(self, *args, **kwargs):", "    def forward(self, **kwargs):"),
        (SCHEDULES, "import hybrid_context_parallel_forward_backward", "import hybrid"),
        (SCHEDULES, "\n\ndef forward_step(\n", "\n@ours\ndef forward_step(\n"),
    ],
)
def test_force_does_not_help_where_the_lines_around_a_patch_have_changed(
    file: str, old: str, new: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(target / file, old, new)
    before = contents(target)
    assert run("check", target) == 1
    for action in ("apply", "revert"):
        assert run(action, target, "--force") == 2 and contents(target) == before
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(f"apply_patches: {file}") and "by hand" in message


def test_our_lines_at_another_place_are_neither_added_again_nor_removed(target: Path) -> None:
    assert run("apply", target) == 0
    edit(target / SCHEDULES, "import contextlib\n", "import contextlib\nimport os\n")
    moved = contents(target)
    for action in ("apply", "revert"):
        assert run(action, target, "--force") == 2 and contents(target) == moved


def test_another_version_is_refused(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for field, version in (("PATCH = 1", "0.16.0"), ('PRE_RELEASE = ""', "0.16.1rc0")):
        original = (target / INFO).read_text()
        edit(target / INFO, field, field.replace("1", "0").replace('""', '"rc0"'))
        before = contents(target)
        assert run("check", target) == 1
        assert run("apply", target, "--force") == 2 and contents(target) == before
        assert f"megatron-core {version}; there are patches for 0.16.1" in capsys.readouterr().err
        (target / INFO).write_text(original)
    (target / INFO).write_text("")
    assert run("apply", target) == 2
    assert "names no version" in capsys.readouterr().err


def test_a_target_without_megatron_core_and_a_missing_file_are_refused(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--apply", str(target / "megatron")], [str(target)], ["--check"]):
        with pytest.raises(SystemExit) as usage:
            apply_patches.main(arguments)
        assert usage.value.code == 2
    (target / LAYER).unlink()
    before = contents(target)
    assert run("apply", target) == 2 and contents(target) == before
    assert f"{LAYER} of {target} cannot be read" in capsys.readouterr().err


def test_a_write_that_fails_half_way_leaves_every_file_as_it_was(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(target)
    replace, destinations = os.replace, []

    def fail_at_second(source: object, destination: Path) -> None:
        destinations.append(destination)
        if len(destinations) == 2:
            raise OSError(28, "No space left on device", str(destination))
        replace(source, destination)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail_at_second)
        assert run("apply", target) == 2
    first = destinations[0]
    assert destinations == [first, destinations[1], first] and destinations[1] != first
    assert contents(target) == before
    assert "all files are as they were" in capsys.readouterr().err


def test_half_a_patch_is_completed(target: Path) -> None:
    before = contents(target)
    assert run("apply", target) == 0
    applied = contents(target)
    (target / LAYER).write_bytes(before[LAYER])
    assert run("check", target) == 0
    assert run("apply", target) == 0 and contents(target) == applied
    (target / SCHEDULES).write_bytes(before[SCHEDULES])
    assert run("revert", target) == 0 and contents(target) == before


def test_permissions_stay(target: Path) -> None:
    (target / LAYER).chmod(0o640)
    assert run("apply", target) == 0
    assert (target / LAYER).stat().st_mode & 0o777 == 0o640


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        apply_patches.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--check", "--apply", "--revert", "--force", "Exit codes", "site-packages"):
        assert word in text
