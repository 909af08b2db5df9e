"""`BatchInferPodOperator` itself, with the real worker in pods of the test cluster."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from airflow_batchinfer.errors import SpecError, WorkerLostError
from airflow_batchinfer.run.commit import commits_of
from airflow_batchinfer.run.launch import launches_of
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import LocalStore
from tests.plans import job, plan_run

if TYPE_CHECKING:
    from airflow_batchinfer.run.plan import Plan
    from tests.kube import KubeServer

pytestmark = pytest.mark.airflow_env

ROOT = Path(__file__).resolve().parents[3]
SLOW = {
    "name": "none",
    "backend": "tests.engines:InstantEngine",
    "engine": {"delay_seconds": 0.5, "max_in_flight": 1},
}


class TaskState(dict[str, Any]):
    """Airflow's task state store, as far as the operator asks it."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


class Task:
    """One mapped infer task of a planned run, its tries in this process."""

    def __init__(self, kube: KubeServer, plan: Plan, kubeconfig: Path) -> None:
        self.kube, self.plan, self.kubeconfig = kube, plan, kubeconfig
        self.store, self.layout = LocalStore(plan.spec.store), RunLayout(plan.folder)
        self.state = TaskState()

    def operator(self, **arguments: Any) -> Any:
        from airflow_batchinfer.operators.infer_kubernetes import BatchInferPodOperator

        bundle = {
            "store": self.plan.spec.store,
            "storage_options": {},
            "folder": self.plan.folder,
            "shards": [s.shard for s in self.plan.shards],
            "rows": self.plan.rows,
            "tokens": 0,
        }
        defaults = {
            "config_file": str(self.kubeconfig),
            "kubernetes_conn_id": None,
            "namespace": "default",
            "image": "worker",
            "worker_python": sys.executable,
            "gpus": 0,
            "deferrable": False,
            "startup_check_interval_seconds": 1,
        }
        return BatchInferPodOperator(task_id="infer", bundle=bundle, **(defaults | arguments))

    def context(self, try_number: int = 1) -> Any:
        ti = SimpleNamespace(
            dag_id="dag",
            task_id="infer",
            run_id="run",
            map_index=0,
            try_number=try_number,
            start_date=datetime.now(UTC),
            xcom_push=_ignore,
        )
        return {"ti": ti, "run_id": "run", "dag": SimpleNamespace(), "task_state_store": self.state}

    def fates(self) -> list[str]:
        return [launch.fate for launch in launches_of(self.store, self.layout, 0)]

    def committed(self) -> bool:
        return all(commits_of(self.store, self.layout, s.shard)[0] for s in self.plan.shards)

    def pod_half_way(self) -> dict[str, Any]:
        from tests.kube.cluster import wait_until

        def pod() -> Any:
            parts = [i for i in self.store.list(self.layout.shard(0)) if "/part-" in i.key]
            return parts and self.kube.cluster.running()

        return wait_until(pod, 60)[0]


def _ignore(**_: Any) -> None:
    pass


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[KubeServer]:
    from tests.kube import Cluster, KubeServer

    cluster = Cluster(tmp_path / "cluster", {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)})
    (tmp_path / "cluster").mkdir()
    with KubeServer(cluster) as server:
        yield server


@pytest.fixture
def task(kube: KubeServer, tmp_path: Path) -> Callable[..., Task]:
    def make(shards: int = 1, store: str = "store", **overrides: Any) -> Task:
        spec = job(tmp_path / store, **({"checkpoint": {"rows": 2, "grace_seconds": 1}} | overrides))
        plan = plan_run(spec, [[f"row {s}-{i}" for i in range(12)] for s in range(shards)])
        return Task(kube, plan, kube.write_kubeconfig(tmp_path / "kubeconfig"))

    return make


def at_half_way(task: Task, act: Callable[[dict[str, Any]], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: act(task.pod_half_way()), daemon=True)
    thread.start()
    return thread


def test_shards_are_committed_and_nothing_is_launched_again(task: Callable[..., Task]) -> None:
    made = task(shards=2)

    made.operator().execute(made.context())
    assert made.committed()
    assert len(made.kube.cluster.launched) == 1

    made.operator().execute(made.context(try_number=2))
    assert len(made.kube.cluster.launched) == 1
    assert made.kube.cluster.list("default", lambda _: True) == []


def test_a_pod_that_ended_while_no_try_watched_is_recorded_and_deleted(task: Callable[..., Task]) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from tests.kube.cluster import wait_until

    made = task()
    with pytest.raises(TaskDeferred):
        made.operator(deferrable=True).execute(made.context())
    wait_until(lambda: made.committed() and not made.kube.cluster.running())

    made.operator(deferrable=True).execute(made.context(try_number=2))

    assert made.fates() == ["committed"]
    assert len(made.kube.cluster.launched) == 1
    assert made.kube.cluster.list("default", lambda _: True) == []


def test_the_triggers_news_come_when_airflow_has_noted_the_deferral(
    task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from airflow_batchinfer.operators import pod_trigger

    made = task(model={**SLOW, "backend": "tests.engines:NoSuchEngine"})
    with pytest.raises(TaskDeferred) as deferred:
        made.operator(deferrable=True).execute(made.context())
    path, arguments = deferred.value.trigger.serialize()
    assert path == "airflow_batchinfer.operators.pod_trigger.BatchInferPodTrigger"
    trigger = pod_trigger.BatchInferPodTrigger(**arguments)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def first_event() -> Any:
        return await anext(aiter(trigger.run()))

    monkeypatch.setattr(pod_trigger.asyncio, "sleep", sleep)
    monkeypatch.setattr(pod_trigger, "QUIET_SECONDS", 600.0)  # longer than a pod takes to fail here

    assert asyncio.run(first_event()).payload["status"] == "failed"
    *polls, quiet = slept
    assert max(polls, default=0.0) < quiet <= pod_trigger.QUIET_SECONDS


def test_a_task_killed_by_sigterm_is_no_success(task: Callable[..., Task]) -> None:
    made = task(model=SLOW)
    operator = made.operator()
    at_half_way(made, lambda _: operator.on_kill())

    with pytest.raises(WorkerLostError, match="Airflow ended this task"):
        operator.execute(made.context())

    assert not made.committed()
    assert made.kube.cluster.running() == []
    assert len(made.kube.cluster.launched) == 1


@pytest.mark.parametrize("by", ["identity", "labels"])
def test_a_living_pod_is_found_again_and_not_paid_twice(task: Callable[..., Task], by: str) -> None:
    made = task(model=SLOW)
    first = made.operator()
    lost = threading.Thread(target=first.execute, args=(made.context(),), daemon=True)
    lost.start()
    made.pod_half_way()
    if by == "labels":
        made.state.clear()

    made.operator().execute(
        made.context(try_number=2)
    )  # while the first try hangs on, as after a lost worker

    assert made.committed()
    assert len(made.kube.cluster.launched) == 1
    lost.join(30)


def test_another_airflows_pod_of_the_same_dag_and_run_is_left_alone(task: Callable[..., Task]) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from tests.kube.cluster import wait_until

    theirs = task(store="theirs", model=SLOW | {"engine": {"delay_seconds": 60}})
    with pytest.raises(TaskDeferred):
        theirs.operator(deferrable=True).execute(theirs.context())
    wait_until(theirs.kube.cluster.running)

    ours = task(store="ours")
    ours.operator().execute(ours.context())
    ours.operator().execute(ours.context(try_number=2))  # puts away what an earlier try left

    assert ours.committed()
    assert [pod["metadata"]["name"] for pod in ours.kube.cluster.running()] == ours.kube.cluster.launched[:1]


def test_a_pod_at_the_run_as_it_was_planned_before_is_not_taken_up(task: Callable[..., Task]) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from tests.kube.cluster import wait_until

    before = task(name="before", model=SLOW | {"engine": {"delay_seconds": 60}})
    with pytest.raises(TaskDeferred):
        before.operator(deferrable=True).execute(before.context())
    wait_until(before.kube.cluster.running)

    anew = task(name="anew")  # another folder, as `on_changed_spec: restart` gives it
    anew.state = before.state
    anew.operator().execute(anew.context(try_number=2))

    assert anew.committed()
    assert len(anew.kube.cluster.launched) == 2
    wait_until(lambda: not anew.kube.cluster.list("default", lambda _: True))


def test_airflows_role_suffices(task: Callable[..., Task]) -> None:
    made = task(model=SLOW)
    at_half_way(made, made.kube.cluster.reclaim)

    made.operator().execute(made.context())
    assert made.fates() == ["reclaimed", "committed"]

    path = ROOT / "docker" / "kubernetes" / "airflow-rbac.yaml"
    (role,) = (o for o in yaml.safe_load_all(path.read_text()) if o["kind"] == "Role")
    granted = {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}
    used = {_right(*request) for request in made.kube.requests}
    assert {("pods", "create"), ("pods", "delete"), ("pods/log", "get")} <= used <= granted


def _right(method: str, path: str) -> tuple[str, str]:
    """The resource and the verb that RBAC asks for."""
    _, resource, *rest = path.removeprefix("/api/v1/namespaces/").split("/")
    read = "get" if rest else "list"
    verb = {"GET": read, "POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]
    return "/".join([resource, *rest[1:]]), verb


def test_reclaims_have_a_budget(task: Callable[..., Task]) -> None:
    made = task(model=SLOW, retry={"reclaims": 1})
    cluster = made.kube.cluster

    def reclaim_twice(pod: dict[str, Any]) -> None:
        from tests.kube.cluster import wait_until

        cluster.vanish(pod)
        wait_until(lambda: len(cluster.launched) == 2 and cluster.running(), 30)
        cluster.vanish(cluster.running()[0])

    at_half_way(made, reclaim_twice)
    with pytest.raises(WorkerLostError, match=r"reclaimed 2 times, `retry.reclaims` is 1"):
        made.operator().execute(made.context())
    assert made.fates() == ["reclaimed", "reclaimed"]

    made.operator().execute(made.context(try_number=2))  # a new try counts anew
    assert made.committed()


def test_the_trigger_outlasts_an_outage_of_the_api_server(
    task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    made = task()
    with pytest.raises(TaskDeferred) as deferred:
        made.operator(deferrable=True).execute(made.context())
    made.kube.outage = 40  # KubernetesPodOperator's trigger gives up after 15, in about a minute
    sleep = asyncio.sleep

    async def sleep_less(seconds: float) -> None:
        await sleep(min(seconds, 0.1))

    monkeypatch.setattr(asyncio, "sleep", sleep_less)

    assert first_event(deferred.value.trigger, monkeypatch)["status"] == "success"
    assert made.kube.outage == 0


@pytest.mark.parametrize("deferrable", [True, False])
def test_an_outage_of_the_api_server_fails_no_launch(task: Callable[..., Task], deferrable: bool) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    made = task()
    made.kube.outage = 2
    with pytest.raises(TaskDeferred) if deferrable else nullcontext():
        made.operator(deferrable=deferrable).execute(made.context())

    assert made.kube.outage == 0
    assert len(made.kube.cluster.launched) == 1


def test_an_outage_when_the_trigger_has_seen_the_end(task: Callable[..., Task]) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from tests.kube.cluster import wait_until

    made = task()
    with pytest.raises(TaskDeferred):
        made.operator(deferrable=True).execute(made.context())
    wait_until(lambda: made.committed() and not made.kube.cluster.running())
    made.kube.outage = 2

    event = {"status": "success", "name": made.kube.cluster.launched[0], "namespace": "default"}
    made.operator(deferrable=True).trigger_reentry(made.context(), event)

    assert made.kube.outage == 0
    assert made.fates() == ["committed"]


def test_an_outage_beyond_all_patience_is_retried_by_name(
    task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_batchinfer.operators import infer_kubernetes

    made = task()
    made.kube.outage = 1
    monkeypatch.setattr(infer_kubernetes, "outlast_outage", lambda question: question)

    event = {"status": "error", "name": "pod", "namespace": "default", "message": "no answer"}
    with pytest.raises(WorkerLostError, match=r"the Kubernetes API does not answer.*Service Unavailable"):
        made.operator(deferrable=True).trigger_reentry(made.context(), event)


@pytest.mark.parametrize(
    ("had_a_pod", "patience", "meaning"),
    [
        (False, "await_first_answer", "it has never answered this task: check the address"),
        (True, "outlast_outage", "a pod of this task, if there is one, runs on"),
    ],
)
def test_an_address_that_never_answered_has_less_patience(
    task: Callable[..., Task], had_a_pod: bool, patience: str, meaning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_batchinfer.operators import infer_kubernetes

    made = task()
    if had_a_pod:
        made.state.set("pod_identifier", {"name": "pod", "namespace": "default"})
    made.kube.url = "http://127.0.0.1:9"  # nobody listens
    made.kube.write_kubeconfig(made.kubeconfig)
    monkeypatch.setattr(infer_kubernetes, patience, lambda question: question)  # with the other it waits

    with pytest.raises(WorkerLostError, match=f"does not answer; {meaning}.*refused"):
        made.operator().execute(made.context())


def test_a_dead_pod_is_never_taken_up(task: Callable[..., Task]) -> None:
    made = task(model=SLOW)
    first = made.operator(on_finish_action="keep_pod")
    at_half_way(made, made.kube.cluster.evict)
    with pytest.raises(WorkerLostError, match=r"evicted: pod .* low on resource"):
        first.execute(made.context())

    made.operator(on_finish_action="keep_pod").execute(made.context(try_number=2))

    assert made.fates() == ["evicted", "committed"]
    assert len(set(made.kube.cluster.launched)) == 2


def first_event(trigger: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a triggerer, which makes the trigger anew, hears of it first."""
    from airflow_batchinfer.operators import pod_trigger

    monkeypatch.setattr(pod_trigger, "QUIET_SECONDS", 0)
    made_anew = pod_trigger.BatchInferPodTrigger(**trigger.serialize()[1])

    async def first() -> Any:
        return await anext(aiter(made_anew.run()))

    payload: dict[str, Any] = asyncio.run(first()).payload
    return payload


CANNOT_START = pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": "missing:1"}, r"image_error: pod .*not found \(check `image`"),
        ({"image": "No Such Name"}, r"image_error: pod .*InvalidImageName"),
        ({"store_secret": "none"}, r'config_error: pod .*secret "none" not found \(check the secrets'),
        ({"model_cache": "missing"}, r'config_error: pod .*persistentvolumeclaim "missing" not found'),
        ({"worker_python": "/no/python"}, r"config_error: pod .*StartError"),
        (
            {"mounted": "none"},
            r'config_error: pod .*FailedMount.*secret "none" not found \(check the secrets',
        ),
    ],
)


def with_volumes(mounted: str | None = None, **arguments: Any) -> dict[str, Any]:
    """The operator's arguments, with the secret `mounted` as a volume."""
    from kubernetes.client import models as k8s

    if mounted is None:
        return arguments
    source = k8s.V1SecretVolumeSource(secret_name=mounted)
    return arguments | {
        "volumes": [k8s.V1Volume(name="credentials", secret=source)],
        "volume_mounts": [k8s.V1VolumeMount(name="credentials", mount_path="/credentials")],
    }


@CANNOT_START
def test_pods_that_cannot_start(task: Callable[..., Task], arguments: dict[str, Any], message: str) -> None:
    made = task()

    with pytest.raises(WorkerLostError, match=message):
        made.operator(stuck_timeout_seconds=1, **with_volumes(**arguments)).execute(made.context())

    assert made.kube.cluster.list("default", lambda _: True) == []


@CANNOT_START
def test_pods_that_cannot_start_seen_by_the_trigger(
    task: Callable[..., Task], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    made = task()
    given = {"deferrable": True, "stuck_timeout_seconds": 1, **with_volumes(**arguments)}
    operator = made.operator(**given)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(made.context())

    event = first_event(deferred.value.trigger, monkeypatch)
    resumed = made.operator(**given)
    with pytest.raises(WorkerLostError, match=message):
        resumed.trigger_reentry(made.context(), event)

    assert made.kube.cluster.list("default", lambda _: True) == []


def test_a_pod_on_a_node_that_does_not_answer_is_given_up(task: Callable[..., Task]) -> None:
    made = task(model=SLOW)
    at_half_way(made, made.kube.cluster.partition)

    made.operator().execute(made.context())

    assert made.committed()
    assert made.fates() == ["reclaimed", "committed"]
    (lost,) = made.kube.cluster.list("default", lambda _: True)  # until somebody removes the node
    assert lost["metadata"]["name"] == made.kube.cluster.launched[0]


def test_the_trigger_gives_up_a_pod_on_a_node_that_does_not_answer(
    task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    made = task(model=SLOW)
    at_half_way(made, made.kube.cluster.partition)
    with pytest.raises(TaskDeferred) as deferred:
        made.operator(deferrable=True, poll_interval=1).execute(made.context())

    event = first_event(deferred.value.trigger, monkeypatch)
    with pytest.raises(TaskDeferred):
        made.operator(deferrable=True).trigger_reentry(made.context(), event)

    assert made.fates() == ["reclaimed"]
    assert len(set(made.kube.cluster.launched)) == 2


@pytest.mark.parametrize("arguments", [{"image": "missing:1"}, {"store_secret": "none"}, {"mounted": "none"}])
def test_a_pod_that_is_stuck_for_a_moment_only(task: Callable[..., Task], arguments: dict[str, Any]) -> None:
    from tests.kube.cluster import wait_until

    made = task()
    cluster = made.kube.cluster

    def mend() -> None:
        wait_until(lambda: cluster.launched)
        cluster.push("missing:1")
        cluster.create_secret("none", {"AWS_ACCESS_KEY_ID": "id"})

    threading.Thread(target=mend, daemon=True).start()
    made.operator(stuck_timeout_seconds=60, **with_volumes(**arguments)).execute(made.context())

    assert made.committed()
    assert len(cluster.launched) == 1


@pytest.mark.parametrize("deferrable", [False, True])
@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        ((403, "exceeded quota: gpus, used: 16, limited: 16"), WorkerLostError, "quota is used up: .*Kueue"),
        ((403, 'violates PodSecurity "restricted:latest"'), SpecError, "refuses the pod: .*PodSecurity"),
        ((422, "spec.containers[0].image: Required value"), SpecError, "refuses the pod: .*Required value"),
    ],
)
def test_pods_that_the_cluster_refuses(
    task: Callable[..., Task],
    deferrable: bool,
    refusal: tuple[int, str],
    error: type[Exception],
    message: str,
) -> None:
    made = task()
    made.kube.cluster.refusal = refusal

    with pytest.raises(error, match=message):
        made.operator(deferrable=deferrable).execute(made.context())


KEPT = pytest.mark.parametrize("on_finish_action", ["delete_pod", "delete_succeeded_pod", "keep_pod"])


@KEPT
def test_no_node_in_time(task: Callable[..., Task], on_finish_action: str) -> None:
    """Kept, it would run beside the pods of the retries, once there are nodes."""
    made = task()
    made.kube.cluster.hold()

    with pytest.raises(WorkerLostError, match=r"launch_timeout: pod .*Insufficient gpu"):
        made.operator(schedule_timeout_seconds=1, on_finish_action=on_finish_action).execute(made.context())

    assert made.kube.cluster.list("default", lambda _: True) == []


WITH_SIDECAR = {"spec": {"containers": [{"name": "base"}, {"name": "linkerd-proxy", "image": "proxy"}]}}


@KEPT
@pytest.mark.parametrize("deferrable", [False, True])
def test_a_sidecar_that_runs_on_is_not_waited_for(
    task: Callable[..., Task], deferrable: bool, on_finish_action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from airflow_batchinfer.operators import pod_patience

    monkeypatch.setattr(pod_patience, "SIDECAR_SECONDS", 0)
    made = task()
    given = {
        "deferrable": deferrable,
        "pod_template_dict": WITH_SIDECAR,
        "on_finish_action": on_finish_action,
        "poll_interval": 1,
    }
    if deferrable:
        with pytest.raises(TaskDeferred) as deferred:
            made.operator(**given).execute(made.context())
        event = first_event(deferred.value.trigger, monkeypatch)
        made.operator(**given).trigger_reentry(made.context(), event)
    else:
        made.operator(**given).execute(made.context())

    assert made.committed()
    assert made.fates() == ["committed"]
    assert made.kube.cluster.list("default", lambda _: True) == []


def test_a_pod_that_starts_while_its_task_waits_for_a_slot_is_watched_on(
    task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from tests.kube.cluster import wait_until

    made = task(model=SLOW)
    made.kube.cluster.hold()
    given = {"deferrable": True, "schedule_timeout_seconds": 1, "execution_timeout": timedelta(hours=1)}
    with pytest.raises(TaskDeferred) as deferred:
        made.operator(**given).execute(made.context())
    event = first_event(deferred.value.trigger, monkeypatch)
    assert event["status"] == "timeout"
    made.kube.cluster.release()
    wait_until(made.kube.cluster.running)

    with pytest.raises(TaskDeferred) as deferred:
        made.operator(**given).trigger_reentry(made.context(), event)
    event = first_event(deferred.value.trigger, monkeypatch)
    made.operator(**given).trigger_reentry(made.context(), event)

    assert event["status"] == "success"
    assert made.fates() == ["committed"]
    assert len(made.kube.cluster.launched) == 1


@pytest.mark.parametrize("startup_timeout_seconds", [0, 600])
def test_a_pod_that_has_just_got_its_node_has_the_time_of_a_start(
    task: Callable[..., Task], startup_timeout_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    made = task()
    made.kube.cluster.hold()
    given = {
        "deferrable": True,
        "schedule_timeout_seconds": 1,
        "startup_timeout_seconds": startup_timeout_seconds,
        "image": "large:1",
    }
    with pytest.raises(TaskDeferred) as deferred:
        made.operator(**given).execute(made.context())
    event = first_event(deferred.value.trigger, monkeypatch)
    made.kube.cluster.release()

    with pytest.raises(TaskDeferred if startup_timeout_seconds else WorkerLostError) as raised:
        made.operator(**given).trigger_reentry(made.context(), event)

    if not startup_timeout_seconds:
        assert "launch_timeout" in str(raised.value)


def test_execution_timeout_ends_a_deferred_pod(
    task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from tests.kube.cluster import wait_until

    made = task(model=SLOW | {"engine": {"delay_seconds": 5, "max_in_flight": 1}})
    given = {"deferrable": True, "execution_timeout": timedelta(seconds=1)}
    with pytest.raises(TaskDeferred) as deferred:
        made.operator(**given).execute(made.context())

    event = first_event(deferred.value.trigger, monkeypatch)
    with pytest.raises(WorkerLostError, match=r"deadline: pod .*raise `execution_timeout`"):
        made.operator(**given).trigger_reentry(made.context(), event)

    wait_until(lambda: not made.kube.cluster.list("default", lambda _: True))
    assert not made.committed(), "its log was not followed until it had ended"


def test_a_bad_job_fails_with_the_workers_word(task: Callable[..., Task]) -> None:
    made = task(model=SLOW | {"backend": "tests.engines:NoSuchEngine"})

    with pytest.raises(SpecError, match="NoSuchEngine"):
        made.operator().execute(made.context())


def test_the_pod_has_what_the_plan_decides(task: Callable[..., Task]) -> None:
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    made = task(model=SLOW | {"engine": engine}, checkpoint={"grace_seconds": 20})
    operator = made.operator(
        gpus=None, model_cache="models", kueue_queue="batch", env_vars={"HF_HOME": "/elsewhere"}
    )
    operator._fill_in(operator._open_work())
    pod = operator.build_pod_request_obj(made.context())
    container = pod.spec.containers[0]
    volumes = {v.name: v for v in pod.spec.volumes}
    environment = {v.name: v.value for v in container.env}

    assert container.resources.limits["nvidia.com/gpu"] == "4"
    assert volumes["batchinfer-model-cache"].persistent_volume_claim.claim_name == "models"
    assert volumes["batchinfer-shared-memory"].empty_dir.medium == "Memory"
    assert {m.mount_path for m in container.volume_mounts} >= {"/dev/shm", "/tmp", "/cache/models"}
    assert environment["HF_HOME"] == "/elsewhere"
    assert pod.metadata.labels["kueue.x-k8s.io/queue-name"] == "batch"
    assert pod.spec.termination_grace_period_seconds == 60
    assert pod.spec.security_context.run_as_non_root
    assert container.security_context.read_only_root_filesystem
    assert not pod.spec.automount_service_account_token
    assert container.termination_message_policy == "FallbackToLogsOnError"
    assert pod.spec.affinity.node_affinity.preferred_during_scheduling_ignored_during_execution
    assert "nvidia.com/gpu" in {t.key for t in pod.spec.tolerations}


@pytest.mark.parametrize(
    ("arguments", "deadline"),
    [
        ({}, None),
        ({"execution_timeout": timedelta(hours=2)}, 2 * 3600 + 900),
        ({"execution_timeout": timedelta(hours=2), "retries": 2}, 3 * 2 * 3600 + 900),
        ({"execution_timeout": timedelta(hours=2), "active_deadline_seconds": 60}, 60),
        (
            {
                "execution_timeout": timedelta(hours=2),
                "pod_template_dict": {
                    "spec": {"activeDeadlineSeconds": 60, "containers": [{"name": "base"}]},
                },
            },
            60,
        ),
    ],
)
def test_a_pod_that_nobody_can_end_any_more_ends_by_itself(
    task: Callable[..., Task], arguments: dict[str, Any], deadline: int | None
) -> None:
    made = task()
    operator = made.operator(**arguments)
    operator._fill_in(operator._open_work())

    assert operator.build_pod_request_obj(made.context()).spec.active_deadline_seconds == deadline


TEMPLATE = {
    "metadata": {"name": "mine"},
    "spec": {
        "affinity": {"podAffinity": {}},
        "tolerations": [{"key": "mine", "operator": "Exists"}],
        "securityContext": {"runAsUser": 7},
        "terminationGracePeriodSeconds": 300,
        "volumes": [{"name": "mine", "emptyDir": {}}, {"name": "model-cache", "emptyDir": {}}],
        "containers": [
            {
                "name": "worker",
                "image": "template",
                "command": ["/opt/worker"],
                "resources": {"limits": {"memory": "80Gi"}},
                "securityContext": {"readOnlyRootFilesystem": False},
                "env": [{"name": "HF_HOME", "value": "/elsewhere"}],
                "volumeMounts": [{"name": "mine", "mountPath": "/tmp"}],
            }
        ],
    },
}


@pytest.mark.parametrize("given_as", ["pod_template_file", "pod_template_dict", "full_pod_spec"])
def test_a_pod_template_wins_over_what_is_filled_in(
    task: Callable[..., Task], given_as: str, tmp_path: Path
) -> None:
    from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator

    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(TEMPLATE))
    templates = {
        "pod_template_file": str(path),
        "pod_template_dict": TEMPLATE,
        "full_pod_spec": PodGenerator.deserialize_model_dict(TEMPLATE),
    }
    made = task()
    operator = made.operator(gpus=2, image=None, **{given_as: templates[given_as]})
    operator._fill_in(operator._open_work())
    pod = operator.build_pod_request_obj(made.context())
    (container,) = pod.spec.containers
    mounts = [m.mount_path for m in container.volume_mounts]
    names = [v.name for v in pod.spec.volumes]

    assert pod.metadata.name.startswith("mine-")
    assert container.image == "template"
    assert container.command == ["/opt/worker"]
    assert container.args == operator.arguments
    assert container.resources.limits == {"memory": "80Gi", "nvidia.com/gpu": "2"}
    assert container.security_context.read_only_root_filesystem is False
    assert [v.value for v in container.env if v.name == "HF_HOME"] == ["/elsewhere"]
    assert len(mounts) == len(set(mounts))
    assert {m.mount_path: m.name for m in container.volume_mounts}["/tmp"] == "mine"
    assert "batchinfer-scratch" not in names
    assert len(names) == len(set(names)), "Kubernetes refuses two of one name"
    assert pod.spec.affinity.pod_affinity is not None
    assert {"mine", "nvidia.com/gpu"} <= {t.key for t in pod.spec.tolerations}
    assert pod.spec.security_context.run_as_user == 7
    assert pod.spec.termination_grace_period_seconds == 300


def test_row_data_and_sidecars_stay_out(task: Callable[..., Task]) -> None:
    made = task()

    assert "bundle" not in made.operator().template_fields
    with pytest.raises(SpecError, match="do_xcom_push"):
        made.operator(do_xcom_push=True)
