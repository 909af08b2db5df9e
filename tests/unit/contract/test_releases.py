"""Two releases of the package on one store: what is not understood is not taken for damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from airflow_batchinfer import __version__
from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import CorruptError, ExitCode, ReleaseError
from airflow_batchinfer.run.commit import Commit, CommittedPart, Tokens, chosen_commit
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import Progress, latest_progress
from airflow_batchinfer.run.stop import read_stop, set_stop
from airflow_batchinfer.store import LocalStore
from tests.plans import job, plan_run
from tests.releases import OTHER, rewrite_as_other_release

_EPOCH = "20260101T000000000Z-00000000"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_run(job(tmp_path / "store"), [["one"], ["two", "three"]])


@pytest.fixture
def store(plan: Plan) -> LocalStore:
    return LocalStore(plan.spec.store)


@pytest.fixture
def layout(plan: Plan) -> RunLayout:
    return RunLayout(plan.folder)


def test_a_document_names_the_release_that_wrote_it(store: LocalStore, layout: RunLayout) -> None:
    assert json.loads(store.read_bytes(layout.plan))["written_by"] == __version__


def test_a_document_of_another_release_is_not_damaged(store: LocalStore, layout: RunLayout) -> None:
    plan = Plan.read(store, layout.plan)
    rewrite_as_other_release(store, layout.plan)
    assert Plan.read(store, layout.plan) == plan, "nothing in it is unknown here"
    rewrite_as_other_release(store, layout.plan, speed="fast")
    with pytest.raises(ReleaseError) as refused:
        Plan.read(store, layout.plan)
    said = str(refused.value)
    assert f"written by airflow_batchinfer {OTHER}, and this is {__version__}" in said
    assert "speed: Extra inputs are not permitted" in said
    assert "damaged" not in said
    assert Plan.read_fields(store, layout.plan)["speed"] == "fast"


def test_a_document_whose_fields_mean_something_else_is_refused(store: LocalStore, layout: RunLayout) -> None:
    rewrite_as_other_release(store, layout.plan, format_version=2)
    with pytest.raises(ReleaseError, match="format_version: Input should be 1"):
        Plan.read(store, layout.plan)


def test_a_flipped_byte_is_damage_whichever_release_wrote_it(store: LocalStore, layout: RunLayout) -> None:
    rewrite_as_other_release(store, layout.plan, speed="fast")
    store.write_bytes(layout.plan, store.read_bytes(layout.plan).replace(b'"fast"', b'"fost"'))
    with pytest.raises(CorruptError, match="is damaged: speed"):
        Plan.read(store, layout.plan)
    with pytest.raises(CorruptError, match="is damaged"):
        Plan.read_fields(store, layout.plan)


def test_a_cut_through_release_and_seal_is_damage(store: LocalStore, layout: RunLayout) -> None:
    whole = store.read_bytes(layout.plan)
    start = whole.index(b'"written_by": "') + len(b'"written_by": "')
    store.write_bytes(layout.plan, whole[: start + 2] + whole[start + 42 :])
    with pytest.raises(CorruptError, match="is damaged: written_by"):
        Plan.read(store, layout.plan)


def test_documents_from_before_they_named_their_release_are_read(
    store: LocalStore, layout: RunLayout, plan: Plan
) -> None:
    content = json.loads(store.read_bytes(layout.plan))
    del content["sha256"], content["written_by"]
    body = (json.dumps(content, indent=1) + "\n").encode()
    seal = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
    store.write_bytes(layout.plan, body.removesuffix(b"\n}\n") + seal.encode())
    assert Plan.read(store, layout.plan) == plan
    store.write_bytes(layout.plan, body)
    assert Plan.read(store, layout.plan) == plan


def test_a_document_laid_out_anew_by_hand_is_read(store: LocalStore, layout: RunLayout, plan: Plan) -> None:
    content = json.loads(store.read_bytes(layout.plan))
    del content["sha256"]
    for indent in (None, 4):
        store.write_bytes(layout.plan, json.dumps(content, indent=indent).encode())
        assert Plan.read(store, layout.plan) == plan


def test_a_field_that_a_release_adds_leaves_digests_as_they_were(plan: Plan) -> None:
    class LaterPlan(Plan):
        speed: str = "fast"

    fields = plan.model_dump(by_alias=True)
    assert LaterPlan(**fields).digest() == plan.digest()
    assert LaterPlan(**fields, speed="slow").digest() != plan.digest()
    assert plan.model_copy(update={"generation": 2}).digest() != plan.digest()


def _commit(store: LocalStore, layout: RunLayout, plan: Plan) -> None:
    Commit(
        shard=0,
        epoch=_EPOCH,
        fingerprint=plan.fingerprint,
        created_at="2026-01-01T00:00:00+00:00",
        rows_sha256=plan.shards[0].rows_sha256,
        rows=1,
        sent=1,
        counts={"succeeded": 1},
        reasons={},
        tokens=Tokens(),
        parts=[CommittedPart(key="p", rows=1, bytes=1, sha256="0")],
    ).write(store, layout.commit(0, _EPOCH))


def test_another_releases_commit_is_not_taken_for_none(
    store: LocalStore, layout: RunLayout, plan: Plan
) -> None:
    _commit(store, layout, plan)
    rewrite_as_other_release(store, layout.commit(0, _EPOCH), speed="fast")
    with pytest.raises(ReleaseError, match=r"commit\.json is whole, but"):
        chosen_commit(store, layout, 0, plan.fingerprint)


def test_what_only_informs_is_passed_over_and_a_stop_marker_stops(
    store: LocalStore, layout: RunLayout
) -> None:
    progress = Progress(
        shard=0,
        epoch=_EPOCH,
        state="running",
        updated_at="2026-01-01T00:00:00+00:00",
        sent=1,
        done=0,
        durable=0,
        counts={},
        tokens=Tokens(),
    )
    progress.write(store, layout.progress(0, _EPOCH))
    rewrite_as_other_release(store, layout.progress(0, _EPOCH), speed="fast")
    assert latest_progress(store, layout, 0) is None
    set_stop(store, layout.folder, "too dear", "eva")
    rewrite_as_other_release(store, layout.stop, speed="fast")
    assert read_stop(store, layout.folder) is not None


@pytest.mark.parametrize("document", ["plan", "ledger"])
def test_a_run_that_cannot_be_read_hides_no_other(
    store: LocalStore, layout: RunLayout, plan: Plan, document: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = plan.model_copy(update={"folder": run_dir(plan.job, "other"), "run_id": "other"})
    other.write(store, RunLayout(other.folder).plan)
    Ledger(
        job=plan.job,
        run_id="other",
        generation=1,
        fingerprint=plan.fingerprint,
        plan_sha256=plan.digest(),
        created_at=plan.created_at,
        complete=True,
        rows=3,
        counts={"succeeded": 3},
        reasons={},
        tokens=Tokens(),
        shards=[],
    ).write(store, RunLayout(other.folder).ledger)
    rewrite_as_other_release(store, f"{other.folder}/{document}.json", speed="fast")
    assert main(["runs", plan.job, "--store", store.uri]) == 0
    said = capsys.readouterr()
    assert plan.folder in said.out
    assert other.folder not in said.out
    assert f"{other.folder}/{document}.json is whole, but" in said.err
    assert main(["show", other.folder, "--store", store.uri]) == ExitCode.OTHER_RELEASE
