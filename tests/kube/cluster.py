"""The cluster's state and its nodes' behaviour: scheduling, kubelet, eviction, nodes that vanish.

Objects are kept as the JSON that the API serves. What a status looks like after each mishap follows
what Kubernetes 1.31 writes (pod conditions of KEP-3329, graceful node shutdown, kubelet's eviction).
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.kube.container import Container, now

Json = dict[str, Any]


class Cluster:
    """Pods of all namespaces, each in a local process: its first container. Others are sidecars, which run
    until the pod is deleted.

    Args:
        folder: where pods' volumes and claims live.
        image_env: environment that every image brings along, for instance `PATH`.
        secrets: data of secrets by name, for `envFrom` and volumes.
    """

    def __init__(
        self,
        folder: Path,
        image_env: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._folder = folder
        self._image_env = dict(image_env)
        self._secrets = {name: dict(data) for name, data in (secrets or {}).items()}
        self._images: set[str] = set()
        self._pods: dict[tuple[str, str], Json] = {}
        self._containers: dict[str, Container] = {}
        self._events: list[Json] = []
        self._version = 0
        self._nodes = 0
        self._schedulable = True
        self._lock = threading.RLock()
        self.refusal: tuple[int, str] | None = None
        """Status and message with which pods are refused, as by an admission controller."""
        self.launched: list[str] = []
        """Names of all pods ever created, in order."""
        self.endings: dict[str, tuple[str, int | None]] = {}
        """By pod: the mishap (or `exit`) that ended it, and its exit code."""

    # What the API server asks.

    def create(self, namespace: str, pod: Json) -> Json | None:
        """Accept a pod and start it; none if the name is taken."""
        with self._lock:
            meta = pod["metadata"]
            key = (namespace, meta["name"])
            if key in self._pods:
                return None
            meta.update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=now())
            pod["spec"].setdefault("terminationGracePeriodSeconds", 30)
            pod["status"] = {"phase": "Pending", "qosClass": "Burstable"}
            self._pods[key] = pod
            self.launched.append(meta["name"])
            self._schedule(pod)
            return self._changed(pod)

    def get(self, namespace: str, name: str) -> Json | None:
        """A copy of a pod; none if it is not there."""
        with self._lock:
            pod = self._pods.get((namespace, name))
            return copy.deepcopy(pod) if pod else None

    def list(self, namespace: str, matches: Callable[[Mapping[str, str]], bool]) -> list[Json]:
        """Copies of the pods of a namespace whose labels match."""
        with self._lock:
            pods = [p for (space, _), p in self._pods.items() if space == namespace]
            return [copy.deepcopy(p) for p in pods if matches(p["metadata"].get("labels", {}))]

    def events(self, namespace: str, fields: Mapping[str, str]) -> list[Json]:
        """Events about a namespace's objects, by fields of these objects. They outlive their objects."""
        with self._lock:
            return [
                copy.deepcopy(event)
                for event in self._events
                if event["metadata"]["namespace"] == namespace
                and all(event["involvedObject"].get(field) == value for field, value in fields.items())
            ]

    def label(self, namespace: str, name: str, labels: Mapping[str, str]) -> Json | None:
        """Merge labels into a pod's."""
        with self._lock:
            pod = self._pods.get((namespace, name))
            if pod is None:
                return None
            pod["metadata"].setdefault("labels", {}).update(labels)
            return self._changed(pod)

    def delete(self, namespace: str, name: str, grace: float | None = None) -> Json | None:
        """Delete as the API does: the pod is there, marked, until its container has ended."""
        with self._lock:
            pod = self._pods.get((namespace, name))
            if pod is None:
                return None
            if grace is None:
                grace = float(pod["spec"]["terminationGracePeriodSeconds"])
            if pod.get("_silent"):
                return self._changed(pod)
            pod["metadata"].update(deletionTimestamp=now(grace), deletionGracePeriodSeconds=int(grace))
            container = self._containers.get(pod["metadata"]["uid"])
            if container is None or container.finished_at is not None:
                self._remove(pod)
            else:
                container.terminate(grace)
            return self._changed(pod)

    def container(self, pod: Json) -> Container | None:
        """The process of a pod; none if it has not started."""
        return self._containers.get(pod["metadata"]["uid"])

    @property
    def resource_version(self) -> str:
        """Grows with every change."""
        return str(self._version)

    # What tests do to it.

    def running(self) -> list[Json]:
        """Pods whose process runs."""
        with self._lock:
            return [copy.deepcopy(p) for p in self._pods.values() if p["status"]["phase"] == "Running"]

    def hold(self) -> None:
        """No node has room: pods created from now on stay pending."""
        self._schedulable = False

    def release(self) -> None:
        """A node was added: pending pods are scheduled."""
        with self._lock:
            self._schedulable = True
            for pod in self._pods.values():
                if pod["status"]["phase"] == "Pending" and "nodeName" not in pod["spec"]:
                    self._schedule(pod)

    def create_secret(self, name: str, data: Mapping[str, str]) -> None:
        """Somebody creates a secret that pods wait for."""
        self._secrets[name] = dict(data)
        self._try_stuck_pods_again()

    def push(self, image: str) -> None:
        """Somebody pushes an image that was missing; or the pull of a large one ends."""
        self._images.add(image)
        self._try_stuck_pods_again()

    def _try_stuck_pods_again(self) -> None:
        with self._lock:
            for pod in self._pods.values():
                if pod["status"]["phase"] == "Pending" and "nodeName" in pod["spec"]:
                    self._start(pod)

    def reclaim(self, pod: Json, grace: float = 25.0) -> None:
        """A spot node is taken back: graceful node shutdown ends the pod, its object stays."""
        message = "Pod was terminated in response to imminent node shutdown."
        mishap = {"phase": "Failed", "reason": "Terminated", "message": message}
        self._end(pod, "reclaim", mishap, "TerminationByKubelet", grace)

    def preempt(self, pod: Json, grace: float = 25.0) -> None:
        """The scheduler makes room for a pod of higher priority: the pod is deleted."""
        self._condition(pod, "PreemptionByScheduler", "preempted by a pod of higher priority")
        self._note(pod, "preempt")
        self.delete(*_key(pod), grace)

    def remove(self, pod: Json) -> None:
        """Somebody deletes it, with its own grace."""
        self._note(pod, "remove")
        self.delete(*_key(pod))

    def evict(self, pod: Json) -> None:
        """Kubelet evicts it for memory pressure, past the hard threshold: no grace."""
        message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 8Mi."
        mishap = {"phase": "Failed", "reason": "Evicted", "message": message}
        self._end(pod, "evict", mishap, "TerminationByKubelet", 0.0)

    def oom_kill(self, pod: Json) -> None:
        """The kernel kills the container at its memory limit."""
        self._end(pod, "oom_kill", {"phase": "Failed"}, None, 0.0, container_reason="OOMKilled")

    def vanish(self, pod: Json) -> None:
        """The node is gone without a word; the pod's object is cleaned up at once."""
        self._note(pod, "vanish")
        with self._lock:
            stored = self._stored(pod)
            container = self._containers[stored["metadata"]["uid"]]
            self._remove(stored)
        container.kill()

    def partition(self, pod: Json) -> None:
        """The node stopped answering an hour ago: the pod is marked for deletion, and nobody deletes it."""
        self._note(pod, "partition")
        with self._lock:
            stored = self._stored(pod)
            stored["_silent"] = True
            stored["metadata"].update(deletionTimestamp=now(-3600.0), deletionGracePeriodSeconds=30)
            container = self._containers[stored["metadata"]["uid"]]
        self._condition(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
        container.kill()

    def close(self) -> None:
        """Kill all that runs."""
        for container in self._containers.values():
            container.kill()
            container.wait(10)

    # Scheduler and kubelet.

    def _schedule(self, pod: Json) -> None:
        status = pod["status"]
        hindrance = self._hindrance(pod)
        if hindrance is not None:
            message = f"0/3 nodes are available: {hindrance}."
            status["conditions"] = [_condition("PodScheduled", "False", "Unschedulable", message)]
            return
        self._nodes += 1
        pod["spec"]["nodeName"] = f"node-{self._nodes}"
        status["conditions"] = [_condition("PodScheduled", "True")]
        status["startTime"] = now()
        self._tell(
            pod, "Scheduled", f"Successfully assigned {'/'.join(_key(pod))} to {pod['spec']['nodeName']}"
        )
        self._start(pod)

    def _start(self, pod: Json) -> None:
        status = pod["status"]
        unmounted = self._unmounted(pod)
        if unmounted is not None:
            self._tell(pod, "FailedMount", unmounted)
            self._wait_state(pod, "ContainerCreating")
            return
        trouble = self._trouble(pod["spec"]["containers"][0])
        if trouble is not None:
            self._wait_state(pod, *trouble)
            return
        command, env = self._prepare(pod)
        self._tell(pod, "Pulled", "Container image already present on machine")
        try:
            container = Container(command, env, self._folder)
        except OSError as error:
            status["phase"] = "Failed"
            self._set_state(
                pod, {"terminated": {"exitCode": 128, "reason": "StartError", "message": str(error)}}
            )
            return
        self._containers[pod["metadata"]["uid"]] = container
        status["phase"] = "Running"
        self._set_state(pod, {"running": {"startedAt": container.started_at}}, ready=True)
        threading.Thread(target=self._watch, args=(pod, container), daemon=True).start()

    def _hindrance(self, pod: Json) -> str | None:
        """Why no node takes the pod, as the scheduler says it."""
        for volume in pod["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", "")
            if "missing" in claim:
                return f'persistentvolumeclaim "{claim}" not found'
        return None if self._schedulable else "3 Insufficient gpu"

    def _unmounted(self, pod: Json) -> str | None:
        """Which volume cannot be mounted, as kubelet says it."""
        for volume in pod["spec"].get("volumes", []):
            name = volume.get("secret", {}).get("secretName")
            if name is not None and name not in self._secrets:
                return f'MountVolume.SetUp failed for volume "{volume["name"]}" : secret "{name}" not found'
        return None

    def _trouble(self, container: Json) -> tuple[str, str] | None:
        """Why the container cannot be made, as a waiting reason and its message."""
        image = container.get("image", "")
        if image != image.lower():
            return (
                "InvalidImageName",
                f'Failed to apply default image tag "{image}": invalid reference format',
            )
        if "large" in image and image not in self._images:  # it is being pulled
            return "ContainerCreating", ""
        if "missing" in image and image not in self._images:
            return "ImagePullBackOff", f'Back-off pulling image "{image}": not found'
        for source in container.get("envFrom", []):
            name = source.get("secretRef", {}).get("name")
            if name is not None and name not in self._secrets:
                return "CreateContainerConfigError", f'secret "{name}" not found'
        return None

    def _prepare(self, pod: Json) -> tuple[list[str], dict[str, str]]:
        """The command, and its environment with mount paths replaced by the volumes' real folders."""
        container = pod["spec"]["containers"][0]
        volumes = {v["name"]: v for v in pod["spec"].get("volumes", [])}
        mounts: dict[str, Path] = {}
        for mount in container.get("volumeMounts", []):
            claim = volumes[mount["name"]].get("persistentVolumeClaim")
            place = (
                Path("claims", claim["claimName"]) if claim else Path(pod["metadata"]["uid"], mount["name"])
            )
            folder = self._folder / place
            folder.mkdir(parents=True, exist_ok=True)
            secret = volumes[mount["name"]].get("secret")
            for name, value in self._secrets[secret["secretName"]].items() if secret else ():
                (folder / name).write_text(value)
            mounts[mount["mountPath"]] = folder
        env = dict(self._image_env)
        for source in container.get("envFrom", []):
            env |= self._secrets[source["secretRef"]["name"]]
        for variable in container.get("env", []):
            value = variable.get("value", "")
            for path, folder in mounts.items():
                if value == path or value.startswith(f"{path}/"):
                    value = str(folder) + value.removeprefix(path)
            env[variable["name"]] = value
        return [*container.get("command", []), *container.get("args", [])], env

    def _watch(self, pod: Json, container: Container) -> None:
        """Kubelet: tell the container's end, and finish a deletion."""
        container.wait()
        with self._lock:
            if self._pods.get(_key(pod)) is not pod or pod.get("_silent"):
                return
            code = container.exit_code
            assert code is not None
            mishap = pod.pop("_mishap", None)
            reason = "Completed" if code == 0 else "Error"
            status = {"phase": "Succeeded" if code == 0 else "Failed"}
            if len(pod["spec"]["containers"]) > 1:  # sidecars know of no end
                status = {"phase": "Running"}
            if mishap is not None:
                status, container_reason = mishap
                reason = container_reason or reason
            self.endings[pod["metadata"]["name"]] = (
                self.endings.get(pod["metadata"]["name"], ("exit", None))[0],
                code,
            )
            pod["status"].update(status)
            terminated = {
                "exitCode": code,
                "reason": reason,
                "startedAt": container.started_at,
                "finishedAt": container.finished_at,
            }
            wants_tail = (
                pod["spec"]["containers"][0].get("terminationMessagePolicy") == "FallbackToLogsOnError"
            )
            if code and wants_tail:
                terminated["message"] = container.tail()
            self._set_state(pod, {"terminated": terminated})
            self._changed(pod)
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)

    def _end(
        self,
        pod: Json,
        name: str,
        status: Json,
        disruption: str | None,
        grace: float,
        container_reason: str | None = None,
    ) -> None:
        self._note(pod, name)
        with self._lock:
            stored = self._stored(pod)
            stored["_mishap"] = (status, container_reason)
            container = self._containers[stored["metadata"]["uid"]]
        if disruption:
            self._condition(pod, disruption, status.get("message", ""))
        if grace:
            container.terminate(grace)
        else:
            container.kill()

    def _condition(self, pod: Json, reason: str, message: str) -> None:
        with self._lock:
            conditions = self._stored(pod)["status"].setdefault("conditions", [])
            conditions.append(_condition("DisruptionTarget", "True", reason, message))

    def _note(self, pod: Json, mishap: str) -> None:
        self.endings[pod["metadata"]["name"]] = (mishap, None)

    def _stored(self, pod: Json) -> Json:
        return self._pods[_key(pod)]

    def _wait_state(self, pod: Json, reason: str, message: str | None = None) -> None:
        waiting = {"reason": reason, "message": message}
        self._set_state(pod, {"waiting": {name: text for name, text in waiting.items() if text}})

    def _tell(self, pod: Json, reason: str, message: str) -> None:
        """Write an event about a pod; one that comes again is counted."""
        meta = pod["metadata"]
        about = {"apiVersion": "v1", "kind": "Pod"} | {k: meta[k] for k in ("namespace", "name", "uid")}
        told = {"reason": reason, "message": message, "involvedObject": about}
        for event in self._events:
            if told.items() <= event.items():
                event.update(count=event["count"] + 1, lastTimestamp=now())
                return
        self._version += 1
        component = "default-scheduler" if reason == "Scheduled" else "kubelet"
        self._events.append(
            told
            | {
                "metadata": {
                    "name": f"{meta['name']}.{self._version:016x}",
                    "namespace": meta["namespace"],
                    "uid": str(uuid.uuid4()),
                    "resourceVersion": str(self._version),
                    "creationTimestamp": now(),
                },
                "type": "Warning" if reason.startswith("Failed") else "Normal",
                "source": {"component": component},
                "reportingComponent": component,
                "reportingInstance": "",
                "firstTimestamp": now(),
                "lastTimestamp": now(),
                "count": 1,
            }
        )

    def _set_state(self, pod: Json, state: Json, *, ready: bool = False) -> None:
        spec = pod["spec"]["containers"][0]
        pod["status"]["containerStatuses"] = [
            {
                "name": spec["name"],
                "image": spec.get("image", ""),
                "imageID": "",
                "ready": ready,
                "restartCount": 0,
                "state": state,
            }
        ]

    def _remove(self, pod: Json) -> None:
        self._pods.pop(_key(pod), None)
        self._version += 1

    def _changed(self, pod: Json) -> Json:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(pod)


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """Poll until `condition` gives something true, and return that; `TimeoutError` after `timeout`."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.05)
    return found


def _key(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _condition(kind: str, status: str, reason: str | None = None, message: str | None = None) -> Json:
    extra = {k: v for k, v in (("reason", reason), ("message", message)) if v}
    return {"type": kind, "status": status, "lastTransitionTime": now(), **extra}
