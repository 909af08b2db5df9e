import pytest

from airflow_batchinfer import errors
from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.operators.bundle import bundles_of
from airflow_batchinfer.operators.retry import FailureRetryPolicy
from airflow_batchinfer.operators.shard_work import ShardWork, worker_error
from airflow_batchinfer.store import LocalStore
from tests.plans import job, plan_run

pytestmark = pytest.mark.airflow_env


@pytest.fixture
def bundle(tmp_path):
    plan = plan_run(job(tmp_path), [["a", "b"], ["c"]])
    return bundles_of(LocalStore(tmp_path), plan, max_tasks=1024)[1]


def test_opens_its_own_shards_without_commits(bundle):
    work = ShardWork.open(bundle)
    assert work.open_shards() == [1]
    with pytest.raises(errors.WorkerLostError, match=r"shard\(s\) 1 have no commit"):
        work.check_committed()


@pytest.mark.parametrize("change", [{"shards": [2]}, {"shards": [0]}, {"rows": 2}])
def test_refuses_a_bundle_of_another_split(bundle, change):
    """A mapped task may be left over from a split with other shards (facts A3, A4)."""
    with pytest.raises(errors.PlanChangedError, match="clear split with downstream"):
        ShardWork.open(bundle | change)


def test_a_bundle_is_known_by_its_plan_and_shards(tmp_path):
    """A run that was deleted and is split again has the same folder, shards and row counts."""

    def identities():
        plan = plan_run(job(tmp_path), [["a", "b"], ["c"]])
        bundles = bundles_of(LocalStore(tmp_path), plan, max_tasks=1024)
        return [ShardWork.open(b).identity() for b in (*bundles, *bundles)]

    before, after = identities(), identities()
    assert before[:2] == before[2:]
    assert len({*before, *after}) == 4


def test_news_of_a_store_that_cannot_be_read_harm_nobody(bundle, monkeypatch):
    """They are for the log only, and whoever tells them watches over a worker that may be fine."""
    work = ShardWork.open(bundle)

    def unreadable(*_):
        raise errors.StoreError("cannot list s3://b/p: 503")

    monkeypatch.setattr(LocalStore, "list", unreadable)
    said = ["shard 0001: nothing to tell for now: cannot list s3://b/p: 503"]
    assert list(work.progress_news()) == said
    assert list(work.progress_news()) == [], "told once"
    assert list(work.summary()) == said
    with pytest.raises(errors.StoreError):
        work.check_committed()


def test_says_when_the_plan_is_gone(bundle):
    """It will not come back: a retry would only delay the message."""
    with pytest.raises(errors.InputError, match=r"plan\.json is gone; clear split"):
        ShardWork.open(bundle | {"folder": "job/runs/other"})


@pytest.mark.parametrize(
    ("code", "message", "kind", "text", "action", "reason"),
    [
        (ExitCode.BAD_SPEC, "no such model", errors.SpecError, "no such model", "fail", "no such model"),
        (ExitCode.BAD_INPUT, "rows damaged", errors.InputError, "rows damaged", "fail", "rows damaged"),
        (ExitCode.STOPPED, "12% invalid", errors.GateError, "12% invalid", "fail", "12% invalid"),
        (ExitCode.OTHER_RELEASE, "by 0.2.0", errors.ReleaseError, "by 0.2.0", "fail", "by 0.2.0"),
        (ExitCode.ENGINE_FAILED, "no GPU", errors.EngineError, "no GPU", "retry", "engine failed: no GPU"),
        (ExitCode.STORE_FAILED, "S3 503", errors.StoreError, "S3 503", "retry", "store failed: S3 503"),
        (
            ExitCode.ENGINE_FAILED,
            None,
            errors.EngineError,
            "the worker ended with ENGINE_FAILED and no message",
            "retry",
            "engine failed: the worker ended with ENGINE_FAILED and no message",
        ),
        (
            -9,
            None,
            errors.WorkerLostError,
            "the worker was killed by SIGKILL (out of memory?)",
            "retry",
            "worker lost: the worker was killed by SIGKILL (out of memory?)",
        ),
        (
            1,
            "KeyError: 'x'",
            errors.WorkerLostError,
            "the worker ended with exit code 1; it said last: KeyError: 'x'",
            "retry",
            "worker lost: the worker ended with exit code 1; it said last: KeyError: 'x'",
        ),
    ],
)
def test_what_a_workers_end_means(code, message, kind, text, action, reason):
    error = worker_error(code, message)
    assert type(error) is kind
    assert str(error) == text
    decision = FailureRetryPolicy().evaluate(error, try_number=1, max_tries=2)
    assert (decision.action.value, decision.reason) == (action, reason)


def test_exceptions_of_others_are_left_to_airflow():
    decision = FailureRetryPolicy().evaluate(KeyError("x"), try_number=1, max_tries=2)
    assert decision.action.value == "default"
