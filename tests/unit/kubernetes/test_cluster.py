"""The test cluster itself: it must not lie about Kubernetes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kubernetes import client

    from tests.kube import KubeServer

pytestmark = pytest.mark.airflow_env


def test_the_command_runs_with_its_environment_and_volumes(kube: KubeServer, api: client.CoreV1Api) -> None:
    from kubernetes.client import models as k8s

    script = "echo $AWS_ACCESS_KEY_ID; echo hello > $CACHE/file; cat $CACHE/file; echo ${HOME:-clean}"
    pod = k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(name="worker"),
        spec=k8s.V1PodSpec(
            containers=[
                k8s.V1Container(
                    name="base",
                    image="worker",
                    command=["sh", "-c"],
                    args=[script],
                    env=[k8s.V1EnvVar(name="CACHE", value="/cache")],
                    env_from=[k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name="aws"))],
                    volume_mounts=[k8s.V1VolumeMount(name="cache", mount_path="/cache")],
                )
            ],
            volumes=[k8s.V1Volume(name="cache", empty_dir=k8s.V1EmptyDirVolumeSource())],
        ),
    )
    api.create_namespaced_pod("default", pod)

    answer = api.read_namespaced_pod_log("worker", "default", follow=True, _preload_content=False)
    log = b"".join(answer.stream()).decode()

    assert log.splitlines() == ["id", "hello", "clean"]


def test_a_followed_log_ends_with_the_container(api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    launch("for i in 1 2 3; do echo line $i; sleep 0.1; done")

    answer = api.read_namespaced_pod_log(
        "worker", "default", follow=True, timestamps=True, _preload_content=False
    )
    lines = b"".join(answer.stream()).decode().splitlines()

    assert [line.split(" ", 1)[1] for line in lines] == ["line 1", "line 2", "line 3"]
    assert all(line.startswith("20") for line in lines)


def test_labels_select_and_can_be_patched(api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    launch("exit 0", name="one")
    launch("exit 0", name="two")
    api.patch_namespaced_pod("two", "default", {"metadata": {"labels": {"checked": "True"}}})

    def names(selector: str) -> list[str]:
        pods = api.list_namespaced_pod("default", label_selector=selector).items
        return [pod.metadata.name for pod in pods]

    assert names("app=one") == ["one"]
    assert names("checked!=True") == ["one"]
    assert names("checked=True,!other") == ["two"]


def test_a_taken_name_is_a_conflict(api: client.CoreV1Api, launch: Callable[..., Any]) -> None:
    from kubernetes.client.exceptions import ApiException

    launch("exit 0")

    with pytest.raises(ApiException, match="409"):
        launch("exit 0")


def test_what_the_types_do_not_know_is_refused(kube: KubeServer) -> None:
    from tests.kube.server import checked

    pod = {"metadata": {"name": "worker"}, "spec": {"containers": [{"name": "base", "imaeg": "typo"}]}}

    with pytest.raises(ValueError, match="loses something"):
        checked(pod, "V1Pod")
