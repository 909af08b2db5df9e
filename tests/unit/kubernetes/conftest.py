from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kubernetes import client

    from tests.kube import KubeServer


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[KubeServer]:
    from tests.kube import Cluster, KubeServer

    cluster = Cluster(tmp_path, {"PATH": os.environ["PATH"]}, secrets={"aws": {"AWS_ACCESS_KEY_ID": "id"}})
    with KubeServer(cluster) as server:
        yield server


@pytest.fixture
def api(kube: KubeServer, tmp_path: Path) -> client.CoreV1Api:
    from kubernetes import client, config

    path = kube.write_kubeconfig(tmp_path / "kubeconfig")
    return client.CoreV1Api(config.new_client_from_config(str(path)))


@pytest.fixture
def launch(api: client.CoreV1Api) -> Callable[..., Any]:
    """Create a pod that runs a shell script, through the official client."""
    from kubernetes.client import models as k8s

    def launch(script: str, name: str = "worker", grace: int = 5, **container: Any) -> k8s.V1Pod:
        fields = {"image": "worker", "command": ["sh", "-c", script]} | container
        pod = k8s.V1Pod(
            metadata=k8s.V1ObjectMeta(name=name, labels={"app": name}),
            spec=k8s.V1PodSpec(
                restart_policy="Never",
                termination_grace_period_seconds=grace,
                containers=[
                    k8s.V1Container(name="base", termination_message_policy="FallbackToLogsOnError", **fields)
                ],
            ),
        )
        return api.create_namespaced_pod("default", pod)

    return launch
