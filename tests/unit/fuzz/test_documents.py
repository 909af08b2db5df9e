"""The store's JSON documents under damage: what was written comes back, or an error that names the object."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.launch import Launch, launches_of, reclaims_of
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger, LedgerShard
from airflow_batchinfer.run.plan import InputFile, InputSnapshot, Plan, PlannedShard
from airflow_batchinfer.run.progress import Progress, latest_progress
from airflow_batchinfer.run.status import run_status
from airflow_batchinfer.run.stop import Stop, read_stop
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.worker.suspects import Suspects, earlier_deaths
from tests.plans import job
from tests.unit.fuzz.damage import damaged, flipped, fuzzed

_NOW, _EPOCH, _SHA = "2026-11-29T17:05:01.123+00:00", "20261129T170501123Z-9f3a01bc", "ab" * 32
_TOKENS = Tokens(prompt=9, output=4)
_PART = CommittedPart(
    key=f"job/runs/r/shards/00000/{_EPOCH}/part-00000.parquet", rows=3, bytes=99, sha256=_SHA
)
_SHARD = PlannedShard(
    shard=0, rows=4, sent=3, predicted_tokens=50, rows_key="k", rows_bytes=99, rows_sha256=_SHA
)

DOCUMENTS: list[Document] = [
    Plan(
        job="job",
        run_id="manual__2026-11-29",
        folder="job/runs/r",
        created_at=_NOW,
        epoch=_EPOCH,
        fingerprint="0123456789abcdef",
        spec=job(Path("/store"), task={"type": "choice", "labels": ["ja", "né"]}),
        input=InputSnapshot(
            files=[InputFile(uri="in.csv", size=9, version="1")], rows=4, columns={"text": "string"}
        ),
        shards=[_SHARD],
    ),
    Commit(
        shard=0,
        epoch=_EPOCH,
        fingerprint="0123456789abcdef",
        created_at=_NOW,
        rows_sha256=_SHA,
        rows=4,
        sent=3,
        counts={"succeeded": 3, "invalid": 1},
        reasons={"empty_output": 1},
        tokens=_TOKENS,
        parts=[_PART],
        held_seconds=1.5,
    ),
    Progress(
        shard=0,
        epoch=_EPOCH,
        state="running",
        updated_at=_NOW,
        sent=3,
        done=2,
        durable=1,
        counts={"succeeded": 2},
        tokens=_TOKENS,
        seconds_left=3.5,
    ),
    Suspects(shard=0, epoch=_EPOCH, worker="host:1:2", apart=True, rows=[1]),
    Ledger(
        job="job",
        run_id="r",
        generation=1,
        fingerprint="0123456789abcdef",
        plan_sha256=_SHA,
        created_at=_NOW,
        complete=True,
        rows=4,
        counts={"succeeded": 4},
        reasons={},
        tokens=_TOKENS,
        shards=[LedgerShard(shard=0, rows=4, sent=3, epoch=_EPOCH, counts={"succeeded": 4})],
    ),
    Stop(created_at=_NOW, by="worker of shard 0000", reason="too many dead rows"),
    Launch(pod="p-1", shards=[0, 1], try_number=1, fate="reclaimed", ended_at=_NOW),
]
ANY = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(allow_nan=False),
        st.integers(-(10**30), 10**30),
        st.sampled_from(["", "x", "NaN", "-1", "2026-01-01", "2026-01-01T00:00:00", "9" * 5000]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def _read(kind: type[Document], data: bytes) -> Document | None:
    """What a document's bytes are read as; none if they are refused by name."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        Path(folder, "document.json").write_bytes(data)
        try:
            return kind.read(store, "document.json")
        except CorruptError as error:
            message = str(error)
    assert f"{folder}/document.json is damaged: " in message
    return None


@ANY
@fuzzed(60)
@given(data=st.data())
def test_what_was_written_comes_back_or_nothing_does(document: Document, data: st.DataObject) -> None:
    written = document.to_bytes()
    assert _read(type(document), written) == document
    assert _read(type(document), data.draw(flipped(written))) in (None, document)
    injured = data.draw(damaged(written))
    found = _read(type(document), injured)
    # Without its seal, a document is one by hand.
    assert found in (None, document) or b'"sha256": ' not in injured


@ANY
@fuzzed(60)
@given(data=st.data())
def test_a_document_by_hand_is_read_or_refused(document: Document, data: st.DataObject) -> None:
    fields: dict[str, Any] = json.loads(document.to_bytes())
    del fields["sha256"], fields["written_by"]
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    found = _read(type(document), json.dumps(fields).encode())
    if found is not None:
        assert _read(type(document), found.to_bytes()) == found


@fuzzed(60)
@given(data=st.data())
def test_readers_live_with_any_damage_to_what_workers_leave(data: st.DataObject) -> None:
    """What is not proof is passed over; what is proof is named; a stop marker stops, whatever it says."""
    plan, commit, progress, suspects, _, stop, launch = DOCUMENTS
    with tempfile.TemporaryDirectory() as folder:
        store, layout = LocalStore(folder), RunLayout("job/runs/r")
        keys = {
            layout.commit(0, _EPOCH): commit,
            layout.progress(0, _EPOCH): progress,
            layout.suspects(0, _EPOCH): suspects,
            layout.launch(0, "p-1"): launch,
            layout.stop: stop,
        }
        plan.write(store, layout.plan)
        for key, document in keys.items():
            path = Path(folder, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.draw(damaged(document.to_bytes())))
        # Without its seal, a document is one by hand.
        by_hand = [key for key in keys if b'"sha256": ' not in store.read_bytes(key)]
        found = run_status(store, layout.folder).shards[0].commit
        assert found in (None, commit) or layout.commit(0, _EPOCH) in by_hand
        assert latest_progress(store, layout, 0) in (None, progress) or layout.progress(0, _EPOCH) in by_hand
        assert earlier_deaths(store, layout, 0, "other", (), 5.0).deaths.total() in (0, 1)
        assert read_stop(store, layout.folder) is not None
        try:
            launches, reclaims = launches_of(store, layout, 0), reclaims_of(store, layout, 0, 1)
        except CorruptError:
            return
        assert (launches, reclaims) == ([launch], 1) or layout.launch(0, "p-1") in by_hand
