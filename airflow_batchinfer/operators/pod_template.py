"""A pod template of the user's, as KubernetesPodOperator reads it.

There an operator's own fields win over the template's, so nothing may be filled in where the template speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from kubernetes.client import models as k8s


def read_template(file: str | None, fields: Mapping[str, Any] | None, pod: k8s.V1Pod | None) -> k8s.V1Pod:
    """What a pod is to be laid over, with a spec and a container even if nothing is said of them.

    Args:
        file: path of a YAML file, `pod_template_file`.
        fields: `pod_template_dict`; not read if there is a file.
        pod: `full_pod_spec`, which wins over both.
    """
    found = k8s.V1Pod()
    if file:
        found = PodGenerator.deserialize_model_file(file)
    elif fields:
        found = PodGenerator.deserialize_model_dict(dict(fields))
    found = PodGenerator.reconcile_pods(found, pod)
    found.metadata = found.metadata or k8s.V1ObjectMeta()
    found.spec = found.spec or k8s.V1PodSpec(containers=[])
    found.spec.containers = found.spec.containers or [k8s.V1Container(name="base")]
    return found
