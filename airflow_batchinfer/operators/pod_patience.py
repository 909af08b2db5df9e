"""Patience with pods that do not start or do not end, and with the API server: KubernetesPodOperator's does
not fit here.

It gives up on the first sight of most image errors, though a node that has just come up often cannot reach
the registry yet. It waits out `startup_timeout` on a missing secret, and for ever on a pod whose node no
longer answers: such a pod is marked for deletion and stays "Running" until somebody removes its node. And an
API server that is away for a minute costs each task that watches a pod one of its retries.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tenacity
from airflow.providers.cncf.kubernetes.kubernetes_helper_functions import (
    TRANSIENT_CONNECTION_ERRORS,
    TRANSIENT_STATUS_CODES,
    PodLaunchFailedException,
)
from airflow.providers.cncf.kubernetes.utils.container import container_is_completed
from airflow.providers.cncf.kubernetes.utils.pod_manager import (
    AsyncPodManager,
    PodLaunchTimeoutException,
    PodManager,
    PodPhase,
    detect_pod_terminate_early_issues,
)

from airflow_batchinfer.operators.pod_fate import Fate, PodEnd, fate_of, missing_mount_of

if TYPE_CHECKING:
    from kubernetes.client import models as k8s

STUCK_SECONDS = 120.0
"""Kubelet tries to pull an image about five times in that, and to make a container a dozen times."""

LOST_AFTER = timedelta(minutes=2)
"""Beyond the time by which a deleted pod should have ended, grace included."""

API_PATIENCE_SECONDS = 900.0
"""Time for an API server to come back: the upgrade of a managed control plane takes minutes, and its pods run
on meanwhile. Beyond that a task's retries go on waiting."""

FIRST_PATIENCE_SECONDS = 300.0
"""The same for a task that never had a pod: there may be no API server at that address, or behind that
certificate. With the usual two retries a task still outlasts the upgrade of a control plane."""

SIDECAR_SECONDS = 30.0
"""How long after its worker a pod may go on: kubelet tells the pod's end a little later than the container's,
and what runs on then is a sidecar (a service mesh's, a log shipper)."""

_NO_EVENTS = "cannot read the events of pod %s, which would tell a missing mount: %s"
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull")


def is_outage(error: BaseException) -> bool:
    """Whether the API server gave no answer, or one that may soon be another."""
    return isinstance(error, TRANSIENT_CONNECTION_ERRORS) or (
        getattr(error, "status", None) in TRANSIENT_STATUS_CODES
    )


_retry_in_outage = functools.partial(
    tenacity.retry,
    retry=tenacity.retry_if_exception(is_outage),
    wait=tenacity.wait_exponential(max=15),
    before_sleep=tenacity.before_sleep_log(logging.getLogger(__name__), logging.WARNING),
    reraise=True,
)

outlast_outage = _retry_in_outage(stop=tenacity.stop_after_delay(API_PATIENCE_SECONDS))
"""Decorator of a function, async or not, that only reads: calls it again while `is_outage`."""

await_first_answer = _retry_in_outage(stop=tenacity.stop_after_delay(FIRST_PATIENCE_SECONDS))
"""The same, for an API server that may not be there at all."""


class StartWatch:
    """What to make of a pod that is looked at again and again until it starts.

    It counts from when the pod was made and got its node, as the API server says: a triggerer's restart gives
    no time anew. A clock ahead of the server's takes as much off, one behind it takes nothing.

    Args:
        schedule_timeout: seconds it may wait for a node.
        startup_timeout: seconds it may take on its node.
        stuck_timeout: seconds that one trouble with its image or its configuration may last. A registry that
            is overloaded or out of order, by KubernetesPodOperator's own list of messages, has all of
            `startup_timeout`: another pod would fare no better.
        container: the worker's container.
        clock: seconds, from wherever.
    """

    def __init__(
        self,
        schedule_timeout: float,
        startup_timeout: float,
        stuck_timeout: float,
        container: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule_timeout, self._startup_timeout = schedule_timeout, startup_timeout
        self._stuck_timeout = stuck_timeout
        self._container = container
        self._clock = clock
        self._since = self._asked = clock()
        self._looked = self._scheduled = False
        self._stuck: tuple[Fate, float] | None = None

    def started(self, pod: k8s.V1Pod) -> bool:
        """Whether it has left the phase `Pending`.

        Raises:
            PodLaunchTimeoutException: it has not, and the patience with it is over.
            PodLaunchFailedException: it failed without ever having had a container.
        """
        phase, now = pod.status.phase, self._clock()
        if phase == PodPhase.FAILED and pod.status.container_statuses is None:
            raise PodLaunchFailedException("the pod failed before its containers started")
        if phase not in (PodPhase.PENDING, PodPhase.UNKNOWN):
            return True
        if not self._looked:
            self._looked, self._since = True, now - _age(pod.metadata.creation_timestamp)
        if not self._scheduled and _scheduled(pod):
            self._scheduled = True
            self._since = self._asked = now - _age(scheduled_at(pod))
        limit = self._startup_timeout if self._scheduled else self._schedule_timeout
        if now - self._since >= limit:
            wanted = "started on its node" if self._scheduled else "scheduled"
            raise PodLaunchTimeoutException(f"the pod was not {wanted} in {limit:.0f} s")
        self._check_stuck(pod, now)
        return False

    def asks_for_events(self) -> bool:
        """Whether it is time to read the pod's events: each `stuck_timeout` on its node, to spare the API."""
        return self._scheduled and self._clock() - self._asked >= self._stuck_timeout

    def hear(self, missing_mount: str | None) -> None:
        """Take in what the events say; see `missing_mount_of`.

        Raises:
            PodLaunchTimeoutException: a volume cannot be mounted. Kubelet does that first of all, so it has
                been so ever since the pod came to its node.
        """
        self._asked = self._clock()
        if missing_mount is not None:
            raise PodLaunchTimeoutException(
                f"the pod is stuck for {self._asked - self._since:.0f} s: {missing_mount}"
            )

    def _check_stuck(self, pod: k8s.V1Pod, now: float) -> None:
        end = fate_of(pod, self._container)
        if end.fate not in (Fate.IMAGE_ERROR, Fate.CONFIG_ERROR) or _may_pass(pod, end):
            self._stuck = None
            return
        if self._stuck is None or self._stuck[0] != end.fate:
            self._stuck = end.fate, now
        lasted = now - self._stuck[1]
        if lasted >= self._stuck_timeout or end.message.startswith(_HOPELESS):
            raise PodLaunchTimeoutException(f"the pod is stuck for {lasted:.0f} s: {end.message}")


def scheduled_at(pod: k8s.V1Pod) -> datetime | None:
    """When the pod got its node; none if it has none yet."""
    condition = _scheduled(pod)
    return condition.last_transition_time if condition else None


def unless_lost(pod: k8s.V1Pod) -> k8s.V1Pod:
    """The pod, if kubelet still cares for it.

    Raises:
        PodLaunchTimeoutException: it should have ended long ago: its node does not answer.
    """
    due = pod.metadata.deletion_timestamp
    if due is not None and datetime.now(UTC) - due > LOST_AFTER:
        raise PodLaunchTimeoutException(f"the pod should have ended by {due:%H:%M:%S} UTC; its node is lost")
    return pod


class _Patient:
    """What both pod managers know of patience."""

    def __init__(self, *args: Any, stuck_timeout: float, container: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stuck_timeout, self._container = stuck_timeout, container

    def _start_watch(self, schedule_timeout: float, startup_timeout: float) -> StartWatch:
        return StartWatch(schedule_timeout, startup_timeout, self._stuck_timeout, self._container)


class PatientPodManager(_Patient, PodManager):
    """The pod manager of a task that watches its pod itself."""

    @outlast_outage
    def read_pod(self, pod: k8s.V1Pod) -> k8s.V1Pod:
        """As KubernetesPodOperator's, `unless_lost`."""
        return unless_lost(super().read_pod(pod))

    async def await_pod_start(
        self,
        pod: k8s.V1Pod,
        schedule_timeout: float = 120,
        startup_timeout: float = 120,
        check_interval: float = 1,
    ) -> None:
        """As KubernetesPodOperator's, with the patience of `StartWatch`."""
        watch = self._start_watch(schedule_timeout, startup_timeout)
        while not watch.started(self.read_pod(pod)):
            if watch.asks_for_events():
                watch.hear(self.missing_mount(pod))
            await asyncio.sleep(check_interval)
        self.stop_watching_events = True

    def await_pod_completion(
        self,
        pod: k8s.V1Pod,
        istio_enabled: bool = False,
        container_name: str = "base",
        do_xcom_push: bool = False,
    ) -> k8s.V1Pod:
        """As KubernetesPodOperator's, but a sidecar of any name is not waited for: its pod never ends."""
        seen = super().await_pod_completion(pod, True, container_name, do_xcom_push)
        waited_until = time.monotonic() + SIDECAR_SECONDS
        while (
            container_is_completed(seen, container_name)
            and seen.status.phase not in PodPhase.terminal_states
            and time.monotonic() < waited_until
        ):
            time.sleep(1)
            seen = self.read_pod(pod)
        return seen

    def missing_mount(self, pod: k8s.V1Pod) -> str | None:
        """See `missing_mount_of`; none if the events cannot be read, as time limits do without them."""
        try:
            return missing_mount_of(self.read_pod_events(pod).items)
        except Exception as error:
            self.log.warning(_NO_EVENTS, pod.metadata.name, error)
            return None


class AsyncPatientPodManager(_Patient, AsyncPodManager):
    """The pod manager of a trigger."""

    @outlast_outage
    async def read_pod(self, pod: k8s.V1Pod) -> k8s.V1Pod:
        """As KubernetesPodOperator's, `unless_lost`."""
        return unless_lost(await super().read_pod(pod))

    async def await_pod_start(
        self,
        pod: k8s.V1Pod,
        schedule_timeout: float = 120,
        startup_timeout: float = 120,
        check_interval: float = 1,
    ) -> None:
        """As KubernetesPodOperator's, with the patience of `StartWatch`."""
        watch = self._start_watch(schedule_timeout, startup_timeout)
        while not watch.started(await self.read_pod(pod)):
            if watch.asks_for_events():
                watch.hear(await self._missing_mount(pod))
            await asyncio.sleep(check_interval)
        self.stop_watching_events = True

    async def _missing_mount(self, pod: k8s.V1Pod) -> str | None:
        try:
            return missing_mount_of((await self.read_pod_events(pod)).items)
        except Exception as error:
            self.log.warning(_NO_EVENTS, pod.metadata.name, error)
            return None


def _scheduled(pod: k8s.V1Pod) -> k8s.V1PodCondition | None:
    """The condition that says that it has a node."""
    conditions = pod.status.conditions or []
    return next((c for c in conditions if c.type == "PodScheduled" and c.status == "True"), None)


def _age(since: datetime | None) -> float:
    """Seconds; none if this machine's clock says that it is yet to come."""
    return max(0.0, (datetime.now(UTC) - since).total_seconds()) if since else 0.0


def _may_pass(pod: k8s.V1Pod, end: PodEnd) -> bool:
    """Whether KubernetesPodOperator takes this image error for one of the registry's own troubles."""
    if end.fate != Fate.IMAGE_ERROR or end.message.startswith(_HOPELESS):
        return False
    # It looks at containers only; an init container's image comes from a registry too.
    statuses = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
    seen: Any = SimpleNamespace(status=SimpleNamespace(container_statuses=statuses))
    return _waits_for_an_image(statuses) and detect_pod_terminate_early_issues(seen) is None


def _waits_for_an_image(statuses: list[k8s.V1ContainerStatus]) -> bool:
    waiting = [status.state.waiting for status in statuses if status.state and status.state.waiting]
    return any(state.reason in ("ErrImagePull", "ImagePullBackOff") for state in waiting)
