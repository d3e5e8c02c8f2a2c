# SPDX-License-Identifier: Apache-2.0
"""Files of frozen features: whole or not there, within a budget, shared, and never an error."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.offload.frozen import store as store_module
from megatron.offload.frozen.digests import digest_of
from megatron.offload.frozen.entry import decode, encode
from megatron.offload.frozen.store import FeatureStore
from tests.support.full_disk import one_warning_about

KEYS = [digest_of(name.encode()) for name in ("first", "second", "third")]
ROW = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = FeatureStore(tmp_path)
    yield opened
    opened.close()


def put(store: FeatureStore, *keys: bytes) -> None:
    for key in keys:
        store.begin_write(key, {"of": key.hex()}, [ROW, key])
    store.wait_for_writes()


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_what_is_stored_is_read(store: FeatureStore) -> None:
    put(store, *KEYS[:2])
    entries = store.read(KEYS[:2])
    assert entries is not None
    assert [bytes(one.payload) for one in entries] == [ROW + key for key in KEYS[:2]]
    assert [one.header for one in entries] == [{"of": key.hex()} for key in KEYS[:2]]
    assert store.read(KEYS) is None  # the third is not there
    assert store.num_stored == 2 and store.stored_bytes == 2 * (len(ROW) + len(KEYS[0]))


def test_another_store_finds_what_one_has_stored(store: FeatureStore, tmp_path: Path) -> None:
    other = FeatureStore(tmp_path)  # opened before anything is there
    put(store, KEYS[0])
    put(other, KEYS[0], KEYS[1])
    assert other.num_stored == 1  # the first was there
    assert store.read(KEYS[:2]) is not None
    other.close()


def test_two_stores_write_the_same_row_at_once(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: False)  # neither sees the other's
    other = FeatureStore(tmp_path)
    put(store, KEYS[0])
    put(other, KEYS[0])
    monkeypatch.undo()
    assert len(files_in(tmp_path)) == 1 and store.read(KEYS[:1]) is not None
    assert other.num_not_stored == 0
    other.close()


@pytest.mark.parametrize("end", [0, 5, 11, 40, -1])
def test_a_file_that_ends_early_is_not_there(
    store: FeatureStore, tmp_path: Path, end: int, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, KEYS[0])
    (path,) = files_in(tmp_path)
    path.write_bytes(path.read_bytes()[:end])
    assert store.read(KEYS[:1]) is None
    one_warning_about("its row is computed again", caplog)
    assert not path.exists()  # so that the row can be stored again
    put(store, KEYS[0])
    assert store.read(KEYS[:1]) is not None


@pytest.mark.parametrize("place", [0, 9, 14, 200, -1])
def test_a_changed_byte_is_found(store: FeatureStore, tmp_path: Path, place: int) -> None:
    put(store, KEYS[0])
    (path,) = files_in(tmp_path)
    body = bytearray(path.read_bytes())
    body[place] ^= 1
    path.write_bytes(body)
    assert store.read(KEYS[:1]) is None


def test_a_file_is_made_of_its_pieces() -> None:
    body = bytearray(b"".join(encode({"a": [1.5, None]}, [b"one", b"", b"two"])))
    entry = decode(body)
    assert entry.header == {"a": [1.5, None]} and bytes(entry.payload) == b"onetwo"


def test_rows_are_read_ahead_once(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(store, *KEYS)
    store.read_ahead(KEYS[:2])
    begun: list[bytes] = []
    begin = store._begin_read
    monkeypatch.setattr(store, "_begin_read", lambda key: begun.append(key) or begin(key))
    assert store.read(KEYS) is not None
    assert begun == KEYS[2:]
    assert store.read(KEYS[:1]) is not None and begun == [KEYS[2], KEYS[0]]


def test_a_row_of_an_earlier_batch_that_was_not_asked_for_is_dropped(store: FeatureStore) -> None:
    put(store, *KEYS)
    store.read_ahead(KEYS[:2])
    store.read_ahead(KEYS[1:])
    assert set(store._ahead) == set(KEYS[1:])


def test_the_budget_holds_over_runs_and_is_divided_among_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one_row = len(ROW) + len(KEYS[0])
    first = FeatureStore(tmp_path, budget_bytes=int(3.5 * one_row))
    put(first, KEYS[0])
    first.close()
    second = FeatureStore(tmp_path, budget_bytes=int(3.5 * one_row), num_ranks=2)
    put(second, *KEYS[1:])
    assert (second.num_stored, second.num_not_stored) == (1, 1)
    one_warning_about("the budget of this process is used, so no more is stored", caplog)
    assert second.read(KEYS[:2]) is not None  # what is there is used
    second.close()
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 3.5 * one_row


def test_a_full_disk_stores_no_more_and_says_so_once(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, KEYS[0])
    monkeypatch.setattr(store_module, "_SPARE_BYTES", 1 << 62)
    put(store, KEYS[1])
    put(store, KEYS[2])
    one_warning_about("the disk is full, so no more is stored", caplog)
    assert store.num_not_stored == 2
    assert store.read(KEYS[:1]) is not None


def test_a_drive_that_is_behind_is_not_waited_for(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_QUEUED_BYTES", 2 * len(ROW))
    store._pending[b"of another row"] = store._begin_read(KEYS[0])[1]  # it is under way
    store._pending_bytes = 2 * len(ROW)
    store.begin_write(KEYS[0], {}, [ROW])
    assert store.num_not_stored == 1
    store._pending.clear()
    store._pending_bytes = 0
    put(store, KEYS[0])
    assert store.num_stored == 1


def test_without_unnamed_files_a_killed_process_leaves_one_that_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_WRONLY)  # refused: EISDIR
    store = FeatureStore(tmp_path)
    put(store, KEYS[0])
    assert store.read(KEYS[:1]) is not None and len(files_in(tmp_path)) == 1
    (path,) = files_in(tmp_path)
    left = [path.with_name(f".unfinished-{name}") for name in ("new", "old")]
    for one in left:
        one.write_bytes(b"half")
    before_s = time.time() - 7200
    os.utime(left[1], (before_s, before_s))
    store.close()
    FeatureStore(tmp_path).close()
    assert [one.exists() for one in left] == [True, False] and path.exists()
