"""Whole runs on the test cluster: a real Airflow with a triggerer launches the real worker in pods."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from airflow_batchinfer.run.commit import commits_of
from airflow_batchinfer.run.launch import launches_of
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import open_store
from tests.integration.engine_jobs import ENGINE, MODELS
from tests.integration.runs import job_fields, paid, process_titled, write_input

if TYPE_CHECKING:
    from airflow_batchinfer.store import Store
    from scripts.airflow_stack import AirflowApi, AirflowStack
    from tests.kube import KubeServer
    from tests.s3 import S3Server

pytestmark = pytest.mark.airflow_env

ROOT = Path(__file__).resolve().parents[2]
ROWS = 96
SHARDS = 4
SLOW = {"delay_seconds": 0.5, "max_in_flight": 2}
"""About four rows a second and pod: long enough to be caught half-way."""


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path) -> Iterator[KubeServer]:
    from tests.kube import Cluster, KubeServer
    from tests.s3.servers import ACCESS_KEY, SECRET_KEY

    image = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}
    store = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), image, secrets={"store": store})
    with KubeServer(cluster) as server:
        server.write_kubeconfig(kubeconfig)
        yield server


@pytest.fixture(scope="module", params=["moto", "juicefs"])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    from tests.s3 import s3_server_of_kind

    with s3_server_of_kind(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the test's own look into the store; Airflow and the pods have other ways."""
    for name, value in s3_server.credentials.items():
        monkeypatch.setenv(name, value)


class PodRun:
    """A run of a DAG of pods: what Airflow, the cluster and the store say about it."""

    def __init__(self, airflow: AirflowApi, kube: KubeServer, dag_id: str, fields: dict[str, Any]) -> None:
        self.airflow, self.kube, self.dag_id, self.fields = airflow, kube, dag_id, fields
        airflow.wait_for_dag(dag_id)
        self._known = set(kube.cluster.launched)
        self.run_id = airflow.trigger(dag_id, {"spec": fields})
        self.store: Store = open_store(fields["store"], fields.get("storage_options"))
        self.layout = RunLayout(run_dir(fields["name"], self.run_id))

    def wait(self) -> str:
        return self.airflow.wait(self.dag_id, self.run_id)

    @property
    def plan(self) -> Plan:
        return Plan.read(self.store, self.layout.plan)

    @property
    def pods(self) -> list[str]:
        return [name for name in self.kube.cluster.launched if name not in self._known]

    def pod_of(self, shard: int) -> dict[str, Any] | None:
        """The running pod of a shard."""
        for pod in self.kube.cluster.running():
            arguments = pod["spec"]["containers"][0]["args"]
            if self.layout.folder in arguments and arguments[-1] == str(shard):
                return pod
        return None

    def task_process(self, shard: int) -> int:
        """Pid of the process in which Airflow runs the shard's infer task."""
        tasks = self.airflow.tasks(self.dag_id, self.run_id)
        (task,) = (t["id"] for t in tasks if (t["task_id"], t["map_index"]) == ("infer", shard))
        return process_titled(f"airflow worker -- {task}")

    def parts(self, shard: int) -> list[str]:
        return [i.key for i in self.store.list(self.layout.shard(shard)) if "/part-" in i.key]

    def strike(self, mishaps: dict[int, Callable[[dict[str, Any]], None]]) -> None:
        """Do to each shard's pod what `mishaps` says, as soon as it has made some of its rows durable."""
        from tests.kube.cluster import wait_until

        left = dict(mishaps)

        def all_struck() -> bool:
            for shard in list(left):
                pod = self.pod_of(shard)
                if pod is not None and len(self.parts(shard)) >= 2:
                    left.pop(shard)(pod)
            return not left

        wait_until(all_struck, 450)  # a model on a busy machine starts slowly

    def all_deferred_half_way(self) -> bool:
        """Whether each shard's task is watched by the triggerer, and some of its rows are durable."""
        states = self.airflow.states(self.dag_id, self.run_id)
        deferred = [name for name, state in states.items() if state == "deferred"]
        return len(deferred) == SHARDS and all(self.parts(shard) for shard in range(SHARDS))

    def rows_in_parts(self, shard: int) -> Counter[int]:
        import pyarrow.parquet as pq

        filesystem, root = self.store.filesystem()
        tables = [pq.read_table(f"{root}/{key}", filesystem=filesystem) for key in self.parts(shard)]
        return Counter(row for table in tables for row in table["row_id"].to_pylist())

    def fates(self, shard: int) -> list[tuple[str, int | None]]:
        return [(launch.fate, launch.exit_code) for launch in launches_of(self.store, self.layout, shard)]

    def tries(self) -> dict[int, int]:
        """Airflow's tries of each infer task, less those that Airflow took back by its own mistake."""
        tasks = self.airflow.tasks(self.dag_id, self.run_id)
        mistakes = self.airflow.state_mismatches(self.dag_id, self.run_id, "infer")
        return {
            t["map_index"]: t["try_number"] - mistakes.get(t["map_index"], 0)
            for t in tasks
            if t["task_id"] == "infer"
        }

    def results(self) -> list[int]:
        import deltalake

        address = self.store.uri_of(f"{self.fields['name']}/results")
        table = deltalake.DeltaTable(address, storage_options=self.store.delta_options() or None)
        return sorted(table.to_pyarrow_table()["row_id"].to_pylist())

    def transcript(self) -> str:
        """What the issue wants to see: pods, exit codes, retries used, final counts."""
        lines = [f"{self.dag_id} {self.store.uri}"]
        for shard in (planned.shard for planned in self.plan.shards):
            lines += [
                f"  shard {shard} pod {launch.pod} on {launch.node}: {launch.fate} (exit {launch.exit_code})"
                for launch in launches_of(self.store, self.layout, shard)
            ]
        ledger = json.loads(self.store.read_bytes(self.layout.ledger))
        lines.append(f"  tries by task: {self.tries()} · rows {ledger['rows']} · counts {ledger['counts']}")
        mistakes = self.airflow.state_mismatches(self.dag_id, self.run_id, "infer")
        if mistakes:
            lines.append(f"  and tries that the scheduler took back by mistake: {mistakes}")
        return "\n".join(lines)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Fields of a job over four shards, with the log of what was paid."""

    def make(store: str, name: str, **overrides: Any) -> dict[str, Any]:
        source = write_input(tmp_path / "rows.jsonl", [f"ticket {i}" for i in range(ROWS)])
        fields = job_fields(
            Path("set below, as a path would lose the slashes of s3://"),
            name,
            source,
            model={"engine": {**SLOW, "paid_log": str(tmp_path / "paid.log")}},
            sharding={"max_rows": ROWS // SHARDS, "max_parallel_shards": 4},
            checkpoint={"rows": 4, "grace_seconds": 2, "progress_seconds": 1},
            **overrides,
        )
        return fields | {"store": store}

    return make


def assert_each_row_once(run: PodRun, rows: int = ROWS) -> None:
    """Every row has one result, and stands in one part: what was durable was never sent again."""
    assert run.results() == list(range(rows))
    for shard in run.plan.shards:
        assert set(run.rows_in_parts(shard.shard).values()) == {1}
        commits, damaged = commits_of(run.store, run.layout, shard.shard)
        assert (len(commits), damaged) == (1, [])


def assert_paid_once(run: PodRun, log: Path, *, lost: int) -> None:
    """Each row was paid for once, but for the few that hard kills lost before they were durable."""
    again = Counter({row: count - 1 for row, count in paid(log).items() if count > 1})
    assert sum(again.values()) <= lost, again


def test_pods_reclaimed_evicted_deleted_and_vanished(
    airflow: AirflowApi,
    kube: KubeServer,
    s3_server: S3Server,
    s3_environment: None,
    job: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"endpoint_url": s3_server.endpoint_url}
    run = PodRun(airflow, kube, "s3_pod_job", job("s3://batch/jobs", "mishaps", storage_options=options))

    cluster = kube.cluster
    run.strike({0: cluster.reclaim, 1: cluster.evict, 2: cluster.remove, 3: cluster.vanish})

    assert run.wait() == "success"
    with capsys.disabled():
        print("\n" + run.transcript())
    assert_each_row_once(run)
    assert_paid_once(run, tmp_path / "paid.log", lost=2 * (4 + SLOW["max_in_flight"]))
    assert run.fates(0) == [("reclaimed", 75), ("committed", 0)]
    assert run.fates(1) == [("evicted", 137), ("committed", 0)]
    assert [fate for fate, _ in run.fates(2)] == ["reclaimed", "committed"]
    assert run.fates(3) == [("reclaimed", None), ("committed", 0)]
    assert run.tries() == {0: 1, 1: 2, 2: 1, 3: 1}  # only the eviction used a retry
    assert len(set(run.pods)) == len(run.pods) == 2 * SHARDS
    assert kube.cluster.running() == []
    assert_no_secret_shows(run, s3_server)


MODEL_ROWS = 64
"""Of one shard: half a minute's work of SmolLM2 on one core, so that it is caught half-way."""


@pytest.mark.mishaps
@pytest.mark.timeout(3600)
def test_the_true_model_survives(
    airflow: AirflowApi,
    kube: KubeServer,
    s3_server: S3Server,
    s3_environment: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mishaps = ["reclaim", "evict", "remove"]
    rows = MODEL_ROWS * len(mishaps)
    source = write_input(tmp_path / "rows.jsonl", [f"The number after {i} is" for i in range(rows)])
    fields = job_fields(
        tmp_path,
        f"smollm2-{len(mishaps)}",
        source,
        model={"name": str(MODELS / "smollm2"), "backend": "vllm", "engine": ENGINE},
        sampling={"max_tokens": 32},
        sharding={"max_rows": MODEL_ROWS},
        checkpoint={"rows": 8, "grace_seconds": 2},
        storage_options={"endpoint_url": s3_server.endpoint_url},
    )
    run = PodRun(airflow, kube, "model_pod_job", fields | {"store": "s3://batch/jobs"})

    run.strike({shard: getattr(kube.cluster, mishap) for shard, mishap in enumerate(mishaps)})

    assert run.wait() == "success"
    with capsys.disabled():
        print("\n" + run.transcript())
    assert_each_row_once(run, rows)
    for shard, mishap in enumerate(mishaps):
        ended, committed = run.fates(shard)
        assert committed == ("committed", 0)
        assert ended[0] == ("evicted" if mishap == "evict" else "reclaimed")
    assert run.tries() == {shard: 2 if mishap == "evict" else 1 for shard, mishap in enumerate(mishaps)}
    assert len(set(run.pods)) == len(run.pods) == 2 * len(mishaps)
    assert kube.cluster.running() == []
    assert_no_secret_shows(run, s3_server)


def assert_no_secret_shows(run: PodRun, server: S3Server) -> None:
    """Credentials are in no log, XCom, rendered field or object of the store."""
    secret = server.credentials["AWS_SECRET_ACCESS_KEY"]
    shown = [run.store.read_bytes(info.key).decode(errors="replace") for info in run.store.list("")]
    for task in run.airflow.tasks(run.dag_id, run.run_id):
        index, name = task["map_index"], task["task_id"]
        shown.append(run.airflow.log(run.dag_id, run.run_id, name, index))
        shown.append(json.dumps(task))
    shown.append(json.dumps(run.airflow.xcom(run.dag_id, run.run_id, "split")))
    assert any("endpoint_url" in text for text in shown)
    assert not any(secret in text for text in shown)


def test_a_pod_watched_from_the_task_itself(
    airflow: AirflowApi,
    airflow_stack: AirflowStack,
    kube: KubeServer,
    job: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "store")
    run = PodRun(airflow, kube, "watched_pod_job", job(store, "watched"))

    def terminate_task(_: Any) -> None:
        os.kill(run.task_process(2), signal.SIGTERM)

    run.strike({0: kube.cluster.reclaim, 1: kube.cluster.oom_kill, 2: terminate_task})

    assert run.wait() == "success"
    assert_each_row_once(run)
    assert_paid_once(run, tmp_path / "paid.log", lost=2 * (4 + SLOW["max_in_flight"]))
    assert run.fates(0) == [("reclaimed", 75), ("committed", 0)]
    assert run.fates(1) == [("oom_killed", 137), ("committed", 0)]
    assert [fate for fate, _ in run.fates(2)] == ["reclaimed", "committed"]
    assert run.tries() == {0: 1, 1: 2, 2: 2, 3: 1}  # a terminated task is no success (fact A1)
    log = airflow.log("watched_pod_job", run.run_id, "infer", 1, attempt=1)
    assert re.search(r"oom_killed: pod \S+: it used more memory .*container_resources", log)
    killed, terminated = sorted(retry_reasons(airflow_stack, run), reverse=True)
    assert killed.startswith("worker lost: oom_killed: pod ")
    assert terminated.startswith("worker lost: Airflow ended this task")


def retry_reasons(stack: AirflowStack, run: PodRun) -> list[str]:
    """Airflow's own notes of why it tried again; no call of its API tells them."""
    query = "SELECT retry_reason FROM task_instance_history WHERE run_id = ? AND retry_reason IS NOT NULL"
    with closing(sqlite3.connect(stack.home / "airflow.db", timeout=60)) as database:
        return [reason for (reason,) in database.execute(query, (run.run_id,))]


def test_a_person_who_ends_tasks_or_their_run_ends_the_pods(
    airflow: AirflowApi, kube: KubeServer, job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from tests.kube.cluster import wait_until

    fields = job(str(tmp_path / "store"), "ended")
    fields["model"]["engine"]["delay_seconds"] = 3.0
    run = PodRun(airflow, kube, "deferred_pod_job", fields)
    path = f"/dags/{run.dag_id}/dagRuns/{quote(run.run_id, safe='')}"

    wait_until(run.all_deferred_half_way, 120)
    airflow.set_state(run.dag_id, run.run_id, "infer", "success", 0)
    airflow.set_state(run.dag_id, run.run_id, "infer", "failed", 1)
    wait_until(lambda: not run.pod_of(0) and not run.pod_of(1), 120)
    assert all(run.pod_of(shard) for shard in (2, 3))
    airflow.call("PATCH", path, json={"state": "failed"})
    wait_until(lambda: not kube.cluster.running(), 120)
    assert len(run.pods) == SHARDS

    airflow.clear(run.dag_id, run.run_id, ["infer"], only_failed=False)  # a forged success, too
    assert run.wait() == "success"
    assert_each_row_once(run)
    assert len(run.pods) == 2 * SHARDS


def test_pods_outlive_scheduler_and_triggerer(
    airflow: AirflowApi,
    airflow_stack: AirflowStack,
    kube: KubeServer,
    job: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    from tests.kube.cluster import wait_until

    fields = job(str(tmp_path / "store"), "outlived")
    fields["model"]["engine"]["delay_seconds"] = 3.0  # beyond the restart
    run = PodRun(airflow, kube, "deferred_pod_job", fields)

    wait_until(run.all_deferred_half_way, 120)
    airflow_stack.crash("scheduler", "triggerer")

    assert run.wait() == "success"
    assert_each_row_once(run)
    assert_paid_once(run, tmp_path / "paid.log", lost=0)
    assert [run.fates(shard) for shard in range(SHARDS)] == [[("committed", 0)]] * SHARDS
    assert set(run.tries().values()) == {1}
    assert len(run.pods) == SHARDS


def test_a_bad_job_fails_at_once_with_the_workers_word(
    airflow: AirflowApi, kube: KubeServer, job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    fields = job(str(tmp_path / "store"), "bad")
    fields["model"]["backend"] = "tests.engines:NoSuchEngine"
    run = PodRun(airflow, kube, "watched_pod_job", fields)

    assert run.wait() == "failed"
    assert set(run.tries().values()) == {1}
    assert run.fates(0) == [("bad_spec", 64)]
    assert "NoSuchEngine" in airflow.log("watched_pod_job", run.run_id, "infer", 0)
