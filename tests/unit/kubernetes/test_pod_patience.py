"""How long `StartWatch` waits, on a clock that the tests turn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kubernetes.client import models as k8s

    from airflow_batchinfer.operators.pod_patience import StartWatch

pytestmark = pytest.mark.airflow_env

SCHEDULE, STARTUP, STUCK = 1000.0, 500.0, 100.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StartWatch:
    from airflow_batchinfer.operators.pod_patience import StartWatch

    return StartWatch(SCHEDULE, STARTUP, STUCK, "base", clock)


def pod(reason: str | None = None, message: str = "", *, init: bool = False, **status: Any) -> k8s.V1Pod:
    """A pod on its node whose container, or init container, waits for that reason."""
    from kubernetes.client import models as k8s

    fields: dict[str, Any] = {
        "phase": "Pending",
        "conditions": [k8s.V1PodCondition(type="PodScheduled", status="True")],
    }
    if reason is not None:
        waits = k8s.V1ContainerState(waiting=k8s.V1ContainerStateWaiting(reason=reason, message=message))
        container = k8s.V1ContainerStatus(
            name="fetch" if init else "base",
            image="x",
            image_id="",
            ready=False,
            restart_count=0,
            state=waits,
        )
        fields["init_container_statuses" if init else "container_statuses"] = [container]
    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(name="worker"),
        spec=k8s.V1PodSpec(containers=[k8s.V1Container(name="base")]),
        status=k8s.V1PodStatus(**(fields | status)),
    )


def gives_up_after(watch: StartWatch, clock: Clock, *pods: k8s.V1Pod) -> float:
    """Seconds until the watch loses patience with a pod that looks like each of `pods` in turn."""
    from airflow.providers.cncf.kubernetes.utils.pod_manager import PodLaunchTimeoutException

    for i in range(10_000):
        try:
            assert not watch.started(pods[i % len(pods)])
        except PodLaunchTimeoutException:
            return clock.now
        clock.now += 10
    raise AssertionError("it never does")


def test_a_pod_waits_for_a_node_and_then_for_its_start(watch: StartWatch, clock: Clock) -> None:
    for _ in range(50):
        assert not watch.started(pod(conditions=[]))
        clock.now += 10

    assert gives_up_after(watch, clock, pod("ContainerCreating")) == 500 + STARTUP


def test_a_pod_without_a_node(watch: StartWatch, clock: Clock) -> None:
    assert gives_up_after(watch, clock, pod(conditions=[])) == SCHEDULE


LONG_AGO, AHEAD = timedelta(days=-1), timedelta(days=1)


@pytest.mark.parametrize(
    ("created", "scheduled", "patience"),
    [
        (LONG_AGO, None, 0.0),
        (LONG_AGO, LONG_AGO, 0.0),
        (LONG_AGO, AHEAD, STARTUP),
        (AHEAD, None, SCHEDULE),
    ],
)
def test_a_watch_begun_anew_counts_the_time_of_the_one_before(
    watch: StartWatch, clock: Clock, created: timedelta, scheduled: timedelta | None, patience: float
) -> None:
    """A triggerer that restarts each hour would let a pod wait for ever. The server's clock may be ahead."""
    seen = pod("ContainerCreating") if scheduled else pod(conditions=[])
    seen.metadata.creation_timestamp = datetime.now(UTC) + created
    if scheduled:
        seen.status.conditions[0].last_transition_time = datetime.now(UTC) + scheduled

    assert gives_up_after(watch, clock, seen) == patience


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize(
    "reasons",
    [
        ["CreateContainerConfigError"],
        ["CreateContainerError", "CreateContainerConfigError"],
        ["ErrImagePull", "ImagePullBackOff"],
    ],
)
def test_a_stuck_pod(watch: StartWatch, clock: Clock, reasons: list[str], init: bool) -> None:
    stuck = [pod(reason, "not found", init=init) for reason in reasons]

    assert gives_up_after(watch, clock, *stuck) == STUCK


def test_a_claim_that_is_not_there(watch: StartWatch, clock: Clock) -> None:
    from kubernetes.client import models as k8s

    message = 'persistentvolumeclaim "models" not found'
    unscheduled = k8s.V1PodCondition(type="PodScheduled", status="False", message=message)

    assert gives_up_after(watch, clock, pod(conditions=[unscheduled])) == STUCK


def test_trouble_that_comes_and_goes_starts_anew(watch: StartWatch, clock: Clock) -> None:
    image, config = pod("ImagePullBackOff", "not found"), pod("CreateContainerConfigError")
    for seen in (image, image, pod("ContainerCreating"), image, image, config):
        assert not watch.started(seen)
        clock.now += STUCK - 1 if seen is image else 0

    assert gives_up_after(watch, clock, config) == 4 * (STUCK - 1) + STUCK


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull"])
def test_what_will_never_work(watch: StartWatch, clock: Clock, reason: str) -> None:
    assert gives_up_after(watch, clock, pod(reason)) == 0


@pytest.mark.parametrize("init", [False, True])
def test_a_registry_in_trouble_has_all_the_time_a_start_has(
    watch: StartWatch, clock: Clock, init: bool
) -> None:
    throttled = pod("ErrImagePull", "toomanyrequests: Too Many Requests", init=init)

    assert gives_up_after(watch, clock, throttled) == STARTUP


def test_pods_that_have_started_or_failed(watch: StartWatch) -> None:
    from airflow.providers.cncf.kubernetes.kubernetes_helper_functions import PodLaunchFailedException

    assert watch.started(pod(phase="Running"))
    assert watch.started(pod("Error", phase="Failed"))
    with pytest.raises(PodLaunchFailedException, match="before its containers started"):
        watch.started(pod(phase="Failed"))


def event(reason: str, message: str = "") -> Any:
    from kubernetes.client import models as k8s
    from kubernetes.client.models.core_v1_event import CoreV1Event

    about = k8s.V1ObjectReference(kind="Pod", name="worker")
    return CoreV1Event(
        metadata=k8s.V1ObjectMeta(name="e"), involved_object=about, reason=reason, message=message
    )


MISSING = 'MountVolume.SetUp failed for volume "v" : secret "s" not found'


@pytest.mark.parametrize(
    "message",
    [
        MISSING,
        'MountVolume.SetUp failed for volume "v" : [configmap "c" not found, failed to sync secret cache]',
        'MountVolume.SetUp failed for volume "v" : configmaps "c" not found',
        'MountVolume.SetUp failed for volume "v" : references non-existent secret key: token',
        'Unable to attach or mount volumes: persistentvolumeclaim "models" not found',
    ],
)
def test_events_name_what_cannot_be_mounted(message: str) -> None:
    from airflow_batchinfer.operators.pod_fate import missing_mount_of

    later = event("FailedMount", "Unable to attach or mount volumes: timed out waiting for the condition")

    assert missing_mount_of([event("Scheduled"), event("FailedMount", message), later]) == (
        f"FailedMount: {message}"
    )


@pytest.mark.parametrize(
    "events",
    [
        [],
        [("FailedScheduling", 'persistentvolumeclaim "models" not found')],
        [("FailedMount", "driver name csi.x not found in the list of registered CSI drivers")],
        [("FailedMount", MISSING), ("Pulling", "")],
        [("Pulled", ""), ("FailedMount", MISSING)],
    ],
)
def test_events_that_name_nothing_missing(events: list[tuple[str, str]]) -> None:
    from airflow_batchinfer.operators.pod_fate import missing_mount_of

    assert missing_mount_of([event(*told) for told in events]) is None


def test_events_are_asked_for_now_and_then(watch: StartWatch, clock: Clock) -> None:
    from airflow.providers.cncf.kubernetes.utils.pod_manager import PodLaunchTimeoutException

    assert not watch.started(pod(conditions=[]))
    clock.now = 10 * STUCK
    assert not watch.asks_for_events(), "it has no node"
    clock.now = SCHEDULE - 1
    assert not watch.started(pod("ContainerCreating"))
    asked = []
    for _ in range(25):
        if watch.asks_for_events():
            asked.append(clock.now - (SCHEDULE - 1))
            watch.hear(None)
        clock.now += 10
    assert asked == [STUCK, 2 * STUCK]
    with pytest.raises(PodLaunchTimeoutException, match=r"stuck for 250 s: FailedMount"):
        watch.hear("FailedMount: secret")
