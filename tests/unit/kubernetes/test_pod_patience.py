"""How long `StartWatch` waits, on a clock that the tests turn."""

from __future__ import annotations

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
