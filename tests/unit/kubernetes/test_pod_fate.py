"""Each mishap, made on the test cluster and read back through the official client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.operators.pod_fate import Fate, fate_of

if TYPE_CHECKING:
    from kubernetes import client
    from kubernetes.client import models as k8s

    from tests.kube import KubeServer

pytestmark = pytest.mark.airflow_env

LEAVES_IN_ORDER = (
    "trap 'echo batchinfer: told to go >&2; exit 75' TERM; echo up; while :; do sleep 0.05; done"
)
HANGS = "trap '' TERM; echo up; while :; do sleep 0.05; done"
ENDED = ("Succeeded", "Failed")


def ended(api: client.CoreV1Api, name: str = "worker") -> Any:
    from tests.kube.cluster import wait_until

    def read() -> Any:
        pod = api.read_namespaced_pod(name, "default")
        return pod if pod.status.phase in ENDED else None

    return wait_until(read)


def gone(api: client.CoreV1Api, name: str = "worker") -> bool:
    return all(pod.metadata.name != name for pod in api.list_namespaced_pod("default").items)


def up(kube: KubeServer, api: client.CoreV1Api) -> Any:
    """The running pod, once its script has set its trap."""
    from tests.kube.cluster import wait_until

    wait_until(lambda: api.read_namespaced_pod_log("worker", "default", _preload_content=False).data)
    return kube.cluster.running()[0]


def pod_with(**status: Any) -> k8s.V1Pod:
    """A pod with that status."""
    from kubernetes.client import models as k8s

    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(name="worker"),
        spec=k8s.V1PodSpec(containers=[k8s.V1Container(name="base")]),
        status=k8s.V1PodStatus(**status),
    )


@pytest.mark.parametrize(
    ("code", "fate"),
    [
        (ExitCode.COMMITTED, Fate.COMMITTED),
        (ExitCode.BAD_SPEC, Fate.BAD_SPEC),
        (ExitCode.BAD_INPUT, Fate.BAD_INPUT),
        (ExitCode.ENGINE_FAILED, Fate.ENGINE_FAILED),
        (ExitCode.STORE_FAILED, Fate.STORE_FAILED),
        (ExitCode.RECLAIMED, Fate.RECLAIMED),
        (ExitCode.STOPPED, Fate.STOPPED),
        (ExitCode.OTHER_RELEASE, Fate.OTHER_RELEASE),
        (1, Fate.CRASHED),
    ],
)
def test_exit_codes_with_the_workers_last_words(
    api: client.CoreV1Api, launch: Callable[..., Any], code: int, fate: Fate
) -> None:
    launch(f"echo starting; echo 'batchinfer: because {code}' >&2; echo 'a thread goes on' >&2; exit {code}")

    end = fate_of(ended(api))

    assert (end.fate, end.exit_code) == (fate, code)
    assert end.node == "node-1"
    assert f"because {code}" in end.message or code == 0


def test_spot_node_taken_back(kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    launch(LEAVES_IN_ORDER)
    kube.cluster.reclaim(up(kube, api), grace=60)

    end = fate_of(ended(api))

    assert (end.fate, end.exit_code, end.message) == (Fate.RECLAIMED, 75, "told to go")


def test_spot_node_taken_back_with_too_little_grace(
    kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]
) -> None:
    launch(HANGS)
    kube.cluster.reclaim(up(kube, api), grace=0.2)

    end = fate_of(ended(api))

    assert (end.fate, end.exit_code) == (Fate.RECLAIMED, 137)
    assert "imminent node shutdown" in end.message


def test_killed_from_outside(kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    launch("echo up; kill -9 $$")

    assert fate_of(ended(api)).fate == Fate.RECLAIMED


def test_eviction_is_not_a_reclaim(
    kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]
) -> None:
    launch(LEAVES_IN_ORDER)
    kube.cluster.evict(up(kube, api))

    end = fate_of(ended(api))

    assert end.fate == Fate.EVICTED
    assert "low on resource: memory" in end.message


def test_out_of_memory(kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    launch(LEAVES_IN_ORDER, resources={"limits": {"memory": "32Gi"}})
    kube.cluster.oom_kill(up(kube, api))

    end = fate_of(ended(api))

    assert (end.fate, end.exit_code) == (Fate.OOM_KILLED, 137)
    assert "32Gi" in end.message


def test_vanished_node(kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    launch(LEAVES_IN_ORDER)
    kube.cluster.vanish(up(kube, api))

    assert gone(api)
    assert fate_of(None).fate == Fate.RECLAIMED


@pytest.mark.parametrize("how", ["delete", "preempt"])
def test_deleted(kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any], how: str) -> None:
    from tests.kube.cluster import wait_until

    launch(HANGS)
    pod = up(kube, api)
    if how == "delete":
        api.delete_namespaced_pod("worker", "default")
    else:
        kube.cluster.preempt(pod, grace=5)

    assert fate_of(api.read_namespaced_pod("worker", "default")).fate == Fate.RECLAIMED
    assert wait_until(lambda: gone(api))


def test_pending_until_a_node_comes(
    kube: KubeServer, api: client.CoreV1Api, launch: Callable[..., Any]
) -> None:
    kube.cluster.hold()
    launch("exit 0")

    pending = api.read_namespaced_pod("worker", "default")
    assert fate_of(pending).fate == Fate.RUNNING
    late = fate_of(pending, overdue=Fate.LAUNCH_TIMEOUT)
    assert late.fate == Fate.LAUNCH_TIMEOUT
    assert "Insufficient gpu" in late.message

    kube.cluster.release()
    assert fate_of(ended(api)).fate == Fate.COMMITTED


@pytest.mark.parametrize(
    ("overdue", "phase", "fate"),
    [
        (Fate.LAUNCH_TIMEOUT, "Pending", Fate.LAUNCH_TIMEOUT),
        (Fate.LAUNCH_TIMEOUT, "Running", Fate.RUNNING),
        (Fate.DEADLINE, "Pending", Fate.LAUNCH_TIMEOUT),
        (Fate.DEADLINE, "Running", Fate.DEADLINE),
    ],
)
def test_what_a_time_limit_says_against_a_pod(overdue: Fate, phase: str, fate: Fate) -> None:
    assert fate_of(pod_with(phase=phase), overdue=overdue).fate == fate


@pytest.mark.parametrize(
    ("container", "fate", "said"),
    [
        ({"image": "missing:1"}, Fate.IMAGE_ERROR, "not found"),
        ({"env_from": [{"secretRef": {"name": "none"}}]}, Fate.CONFIG_ERROR, 'secret "none" not found'),
        ({"command": ["/no/such/python"]}, Fate.CONFIG_ERROR, "/no/such/python"),
    ],
)
def test_pods_that_cannot_start(
    api: client.CoreV1Api, launch: Callable[..., Any], container: dict[str, Any], fate: Fate, said: str
) -> None:
    launch("exit 0", **container)

    end = fate_of(api.read_namespaced_pod("worker", "default"))

    assert end.fate == fate
    assert said in end.message


@pytest.mark.parametrize(
    ("status", "fate"),
    [
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "was 1"}, Fate.RECLAIMED),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, Fate.RECLAIMED),
        ({"phase": "Failed", "reason": "NodeAffinity"}, Fate.RECLAIMED),
        ({"phase": "Failed", "reason": "DeadlineExceeded", "message": "too long"}, Fate.DEADLINE),
        ({"phase": "Unknown"}, Fate.RECLAIMED),
        ({"phase": "Running"}, Fate.RUNNING),
    ],
)
def test_statuses_without_a_containers_word(status: dict[str, Any], fate: Fate) -> None:
    assert fate_of(pod_with(**status)).fate == fate


def test_a_failed_init_container_holds_the_worker_up() -> None:
    from kubernetes.client import models as k8s

    state = k8s.V1ContainerState(waiting=k8s.V1ContainerStateWaiting(reason="ErrImagePull", message="denied"))
    init = k8s.V1ContainerStatus(
        name="fetch-model", image="x", image_id="", ready=False, restart_count=0, state=state
    )

    assert fate_of(pod_with(phase="Pending", init_container_statuses=[init])).fate == Fate.IMAGE_ERROR
