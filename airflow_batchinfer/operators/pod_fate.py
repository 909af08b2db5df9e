"""What became of a worker's pod: told apart from its status, where KubernetesPodOperator says "failure".

Pure: it looks at a `V1Pod` (or at the absence of one) and its events, and talks to nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.operators.shard_work import MESSAGE_PREFIX
from airflow_batchinfer.run.launch import RECLAIMED

if TYPE_CHECKING:
    from kubernetes.client import models as k8s
    from kubernetes.client.models.core_v1_event import CoreV1Event


class Fate(StrEnum):
    """How a pod ended. Only a commit in the store makes a shard complete, whatever stands here."""

    COMMITTED = "committed"
    """The worker says that it has committed every shard."""
    RECLAIMED = RECLAIMED
    """It had to go through no fault of its own: spot node taken back, drained, preempted, deleted."""
    EVICTED = "evicted"
    """The kubelet threw it out because its node ran short of memory, disk or processes."""
    OOM_KILLED = "oom_killed"
    """It used more memory than its limit."""
    IMAGE_ERROR = "image_error"
    """Its image cannot be pulled."""
    CONFIG_ERROR = "config_error"
    """Its container cannot be made: a missing secret, config map, volume claim or command."""
    LAUNCH_TIMEOUT = "launch_timeout"
    """It was not scheduled, or did not start, in the time given."""
    DEADLINE = "deadline"
    """It ran for longer than `active_deadline_seconds` or the task's `execution_timeout`."""
    BAD_SPEC = "bad_spec"
    BAD_INPUT = "bad_input"
    ENGINE_FAILED = "engine_failed"
    STORE_FAILED = "store_failed"
    STOPPED = "stopped"
    OTHER_RELEASE = "other_release"
    CRASHED = "crashed"
    """The worker ended with an exit code that is none of its own."""
    RUNNING = "running"
    """It has not ended."""


@dataclass(frozen=True, slots=True)
class PodEnd:
    """A pod's fate with what is known of it."""

    fate: Fate
    message: str = ""
    exit_code: int | None = None
    node: str | None = None


_BY_EXIT_CODE = {
    ExitCode.COMMITTED: Fate.COMMITTED,
    ExitCode.BAD_SPEC: Fate.BAD_SPEC,
    ExitCode.BAD_INPUT: Fate.BAD_INPUT,
    ExitCode.ENGINE_FAILED: Fate.ENGINE_FAILED,
    ExitCode.STORE_FAILED: Fate.STORE_FAILED,
    ExitCode.RECLAIMED: Fate.RECLAIMED,
    ExitCode.STOPPED: Fate.STOPPED,
    ExitCode.OTHER_RELEASE: Fate.OTHER_RELEASE,
}
_IMAGE_REASONS = frozenset(
    {
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CONFIG_REASONS = frozenset(
    {
        "ContainerCannotRun",
        "CreateContainerConfigError",
        "CreateContainerError",
        "PostStartHookError",
        "PreCreateHookError",
        "RunContainerError",
        "StartError",
    }
)
_NODE_REASONS = ("NodeAffinity", "NodeLost", "NodeShutdown", "OutOf", "Preempting", "Shutdown", "Terminated")
"""Beginnings of `status.reason` when the node went, or refused the pod after it was bound to it."""
_MISSING_CLAIM = re.compile(r'persistentvolumeclaim "[^"]+" not found')
_MISSING_MOUNT = re.compile(
    r'(secret|configmap|persistentvolumeclaim)s? "[^"]+" not found'
    r"|references non-existent (secret|config) key"
)
"""Not "driver … not found": a driver comes up a little later than its node."""
_AFTER_MOUNTS = frozenset({"Pulling", "Pulled", "Created", "Started"})
"""Reasons of events that kubelet gives only once all volumes of the pod are mounted."""
_REFUSED_BY_DEVICE_PLUGIN = "UnexpectedAdmissionError"
_KILLED = frozenset({137, 143})
"""128 + SIGKILL and 128 + SIGTERM: ended from outside, not by the worker's own decision."""


def fate_of(
    pod: k8s.V1Pod | None,
    container: str = "base",
    *,
    overdue: Fate | None = None,
    missing_mount: str | None = None,
) -> PodEnd:
    """What became of a pod.

    Args:
        pod: the pod as the API server last told it; none if it is gone (404), which is how a pod on a
            node that was taken away looks once Kubernetes has cleaned up.
        container: the worker's container.
        overdue: which time limit ended the wait for it: `LAUNCH_TIMEOUT` says nothing against a pod that has
            started since, `DEADLINE` holds for any.
        missing_mount: what its events say of a volume that cannot be mounted; see `missing_mount_of`.
    """
    if pod is None:
        return PodEnd(Fate.RECLAIMED, "the pod is gone")
    node = pod.spec.node_name if pod.spec else None
    status = pod.status
    state = _state(status, container)
    waiting, terminated = (state.waiting, state.terminated) if state else (None, None)
    code = terminated.exit_code if terminated else None

    def end(fate: Fate, *said: str | None) -> PodEnd:
        return PodEnd(fate, ": ".join(text.strip() for text in said if text), code, node)

    if terminated and terminated.exit_code == ExitCode.COMMITTED:
        return end(Fate.COMMITTED)
    if status.reason == "Evicted":
        return end(Fate.EVICTED, status.message)
    if terminated and terminated.reason == "OOMKilled":
        limit = _memory_limit(pod, container)
        return end(Fate.OOM_KILLED, f"it used more memory than its limit{limit}")
    if status.reason == "DeadlineExceeded":
        return end(Fate.DEADLINE, status.message)
    if terminated and terminated.exit_code in _BY_EXIT_CODE:  # the worker itself knows best
        return end(_BY_EXIT_CODE[ExitCode(terminated.exit_code)], _last_line(terminated.message))
    disruption = _disruption(status)
    if disruption:
        return end(Fate.RECLAIMED, disruption)
    if status.reason and status.reason.startswith((*_NODE_REASONS, _REFUSED_BY_DEVICE_PLUGIN)):
        return end(Fate.RECLAIMED, status.reason, status.message)
    if terminated and terminated.reason in _CONFIG_REASONS:
        return end(Fate.CONFIG_ERROR, terminated.reason, terminated.message)
    if terminated and terminated.exit_code in _KILLED:
        return end(Fate.RECLAIMED, f"it was killed from outside (exit code {code})")
    if terminated:
        return end(Fate.CRASHED, f"exit code {code}", _last_line(terminated.message))
    if pod.metadata.deletion_timestamp or status.phase == "Unknown":
        return end(Fate.RECLAIMED, "the pod is being deleted, or its node does not answer")
    if waiting and waiting.reason in _IMAGE_REASONS:
        return end(Fate.IMAGE_ERROR, waiting.reason, waiting.message)
    if waiting and waiting.reason in _CONFIG_REASONS:
        return end(Fate.CONFIG_ERROR, waiting.reason, waiting.message)
    unscheduled = _why_unscheduled(status)
    if unscheduled and _MISSING_CLAIM.search(unscheduled):
        return end(Fate.CONFIG_ERROR, unscheduled)
    if missing_mount and status.phase == "Pending":
        return end(Fate.CONFIG_ERROR, missing_mount)
    if status.phase == "Failed":  # without a container's end: it never ran
        return end(Fate.RECLAIMED, status.reason or "it failed before its container started", status.message)
    if overdue and status.phase == "Pending":
        reason = unscheduled and f"not scheduled: {unscheduled}"
        return end(Fate.LAUNCH_TIMEOUT, reason, "the time limit is over")
    if overdue == Fate.DEADLINE:
        return end(Fate.DEADLINE, "the time limit is over")
    return end(Fate.RUNNING)


def missing_mount_of(events: Iterable[CoreV1Event]) -> str | None:
    """Which secret, config map or claim kubelet misses to mount, in its words: no pod's status says it.

    Args:
        events: of one pod, in any order.
    """
    found = None
    for event in events:
        if event.reason in _AFTER_MOUNTS:
            return None
        if event.reason == "FailedMount" and _MISSING_MOUNT.search(event.message or ""):
            found = f"{event.reason}: {event.message}"
    return found


def _state(status: k8s.V1PodStatus, container: str) -> k8s.V1ContainerState | None:
    """The worker container's state; while an init container holds it up, that one's."""
    for init in status.init_container_statuses or []:
        state = init.state
        failed = state and state.terminated and state.terminated.exit_code != 0
        stuck = state and state.waiting and state.waiting.reason not in (None, "PodInitializing")
        if failed or stuck:
            return state
    return next((s.state for s in status.container_statuses or [] if s.name == container), None)


def _disruption(status: k8s.V1PodStatus) -> str | None:
    for condition in status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return f"{condition.reason}: {condition.message}" if condition.message else condition.reason
    return None


def _why_unscheduled(status: k8s.V1PodStatus) -> str | None:
    """The scheduler's word on a pod that has no node."""
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            said: str | None = condition.message or condition.reason
            return said
    return None


def _memory_limit(pod: k8s.V1Pod, container: str) -> str:
    for candidate in pod.spec.containers if pod.spec else []:
        limits = candidate.resources.limits if candidate.resources else None
        if candidate.name == container and limits and "memory" in limits:
            return f" of {limits['memory']}"
    return ""


def _last_line(text: str | None) -> str | None:
    """A worker's own word on its end, else its last line; kubelet keeps the tail of a failed one's output."""
    lines = (text or "").strip().splitlines()
    said = [line for line in lines if line.startswith(MESSAGE_PREFIX)]
    return (said or lines)[-1].removeprefix(MESSAGE_PREFIX) if lines else None
