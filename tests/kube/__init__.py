"""A Kubernetes cluster for tests: the API over real HTTP, each pod's command as a real process."""

from tests.kube.cluster import Cluster
from tests.kube.server import KubeServer

__all__ = ["Cluster", "KubeServer"]
