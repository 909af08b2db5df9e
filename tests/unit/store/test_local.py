"""The local store: whole objects or none, and nothing outside its folder."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from airflow_batchinfer.errors import SpecError, StoreError
from airflow_batchinfer.store import LocalStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_what_is_written_is_read_listed_and_deleted(store: LocalStore, tmp_path: Path) -> None:
    store.write_bytes("a/b/one", b"1")
    store.write_bytes("a/b/one", b"22")
    source = tmp_path / "big"
    source.write_bytes(b"333")
    store.put_file(source, "a/two")
    assert not source.exists()
    assert store.read_bytes("a/b/one") == b"22"
    assert [(i.key, i.size) for i in store.list("a")] == [("a/b/one", 2), ("a/two", 3)]
    assert list(store.list("nowhere")) == []
    store.delete("a/two")
    store.delete("a/two")
    assert not store.exists("a/two")
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a/two")


def test_an_object_deleted_during_a_listing_hides_no_other(store: LocalStore) -> None:
    for name in ("a", "b", "c"):
        store.write_bytes(f"run/{name}", b"x")
    listing = store.list("run")
    assert next(listing).key == "run/a"
    store.delete("run/b")
    assert [i.key for i in listing] == ["run/c"]


def test_a_listing_is_sorted_by_key_as_on_s3(store: LocalStore) -> None:
    keys = ["a-b", "a/c", "a.d", "a/b/e"]
    for key in keys:
        store.write_bytes(key, b"")
    assert [i.key for i in store.list("")] == sorted(keys)
    assert list(store.list("a-b")) == []


def test_folders_stand_directly_in_one(store: LocalStore) -> None:
    for key in (
        "runs/b/plan.json",
        "runs/a/shards/0/x",
        "runs/a~2/x",
        "runs/a-b/x",
        "runs/file",
        "other/c/x",
    ):
        store.write_bytes(key, b"x")
    assert list(store.folders("runs")) == ["runs/a-b", "runs/a", "runs/a~2", "runs/b"]
    assert list(store.folders("")) == ["other", "runs"]
    assert list(store.folders("nowhere")) == []
    assert list(store.folders("runs/file")) == []


def test_info(store: LocalStore) -> None:
    store.write_bytes("a/b", b"123")
    assert store.info("a/b") == next(store.list("a"))
    assert store.info("a") is None
    assert store.info("a/c") is None


def test_an_object_that_cannot_be_looked_up_is_not_taken_for_missing(store: LocalStore) -> None:
    store.write_bytes("run/a", b"x")
    os.symlink("loop", store.uri_of("run/loop"))
    with pytest.raises(StoreError, match=r"cannot look up .*loop: .*levels of symbolic links"):
        store.exists("run/loop")
    assert [store.exists(key) for key in ("run/a", "run/b", "run", "run/a/b")] == [True, False, False, False]


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_bytes("run/a", b"x")

    def refuse(path: object) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)  # the tests' user may be root, who may read everything
    with pytest.raises(StoreError, match=r"cannot list .*run: .*denied"):
        list(store.list("run"))


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/passwd"])
def test_a_key_that_leaves_the_store_is_refused(store: LocalStore, key: str) -> None:
    for call in (store.read_bytes, store.exists, store.delete):
        with pytest.raises(StoreError, match="leaves the store"):
            call(key)
    with pytest.raises(StoreError, match="leaves the store"):
        store.write_bytes(key, b"")


def test_a_store_that_cannot_be_written_says_which_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        LocalStore(tmp_path / "file").write_bytes("key", b"")


def test_a_reader_never_sees_half_an_object(store: LocalStore) -> None:
    contents = [bytes([i]) * 200_000 for i in range(4)]
    store.write_bytes("key", contents[0])
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            for content in contents:
                store.write_bytes("key", content)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(200):
            assert store.read_bytes("key") in contents
            assert [i.key for i in store.list("")] == ["key"]
    finally:
        stop.set()
        writer.join()


def test_a_file_uri_is_a_local_path(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)


def test_half_written_files_go_once_they_are_old(store: LocalStore) -> None:
    store.write_bytes("run/part", b"whole")
    leftover = Path(store.uri_of("run/.tmp-0123"))
    leftover.write_bytes(b"ha")
    os.utime(leftover, (0, 0))
    assert store.remove_unfinished("other", timedelta(days=1)) == 0
    assert store.remove_unfinished("run", timedelta(days=1), dry_run=True) == 1
    assert store.remove_unfinished("run", timedelta(days=1)) == 1
    assert not leftover.exists()
    assert store.remove_unfinished("", timedelta(0)) == 0
    assert store.read_bytes("run/part") == b"whole"


@pytest.mark.parametrize("address", ["gs://bucket/out", "S3://bucket", "s3a://bucket", "https://host/x"])
def test_an_address_that_no_store_can_have_makes_no_folder(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SpecError, match=f"`{address.partition(':')[0]}://` is no store: give a local path or"
    ):
        open_store(address)
    assert list(tmp_path.iterdir()) == []
