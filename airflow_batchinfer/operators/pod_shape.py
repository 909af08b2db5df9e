"""Parts of a worker's pod: spot nodes, GPUs, volumes, security. Each default is justified in
docs/kubernetes.md; nothing here talks to a cluster."""

from __future__ import annotations

from typing import Literal

from kubernetes.client import models as k8s

from airflow_batchinfer.spec import JobSpec

Spot = Literal["prefer", "require", "never"]
"""Whether workers run on spot (preemptible) nodes."""

MODEL_CACHE = "/cache/models"
COMPILE_CACHE = "/cache/compiled"
SCRATCH = "/tmp"

_SPOT_LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Node labels by which Karpenter and the clouds mark spot nodes."""
_SPOT_TAINTS = (
    "karpenter.sh/capacity-type",
    "cloud.google.com/gke-spot",
    "kubernetes.azure.com/scalesetpriority",
)
_RESERVE_SECONDS = 40
"""Beyond the worker's own grace: the last part's upload, and the engine's end."""


def gpus_of(spec: JobSpec) -> int:
    """GPUs that the engine's own arguments ask for; none if the engine is a server elsewhere."""
    if spec.model.backend == "openai":
        return 0
    engine = spec.model.engine
    return int(engine.get("tensor_parallel_size", 1)) * int(engine.get("pipeline_parallel_size", 1))


def grace_seconds(spec: JobSpec) -> int:
    """How long Kubernetes has to wait between SIGTERM and SIGKILL for the worker to leave in order."""
    return int(spec.checkpoint.grace_seconds) + _RESERVE_SECONDS


def resources(given: k8s.V1ResourceRequirements | None, gpu: str, count: int) -> k8s.V1ResourceRequirements:
    """The container's resources, as given, with `count` of the extended resource `gpu` added."""
    found = given or k8s.V1ResourceRequirements(
        requests={"cpu": "4", "memory": "16Gi"}, limits={"memory": "32Gi"}
    )
    extra = {gpu: str(count)} if count else {}
    return k8s.V1ResourceRequirements(
        claims=found.claims,
        requests={**extra, **(found.requests or {})},
        limits={**extra, **(found.limits or {})},
    )


def tolerations(spot: Spot, gpu: str) -> list[k8s.V1Toleration]:
    """Of the taints that keep other pods off GPU nodes and, unless `never`, off spot nodes."""
    taints = (gpu,) if spot == "never" else (gpu, *_SPOT_TAINTS)
    return [k8s.V1Toleration(key=key, operator="Exists", effect="NoSchedule") for key in taints]


def affinity(spot: Spot) -> k8s.V1Affinity | None:
    """Draw the pod to spot nodes (`prefer`), bind it to them (`require`), or say nothing (`never`)."""
    if spot == "never":
        return None
    terms = [
        k8s.V1NodeSelectorTerm(
            match_expressions=[k8s.V1NodeSelectorRequirement(key=key, operator="In", values=[value])]
        )
        for key, value in _SPOT_LABELS.items()
    ]
    if spot == "require":
        node = k8s.V1NodeAffinity(
            required_during_scheduling_ignored_during_execution=k8s.V1NodeSelector(node_selector_terms=terms)
        )
    else:
        node = k8s.V1NodeAffinity(
            preferred_during_scheduling_ignored_during_execution=[
                k8s.V1PreferredSchedulingTerm(weight=100, preference=term) for term in terms
            ]
        )
    return k8s.V1Affinity(node_affinity=node)


def volumes(
    spec: JobSpec, model_claim: str | None, compile_claim: str | None, shared_memory: str | None
) -> list[tuple[k8s.V1VolumeMount, k8s.V1Volume]]:
    """All that a worker with a read-only root writes to, and shared memory for several GPUs.

    Their names are none that a user's own volumes have: Kubernetes refuses a pod with two of one name.

    Args:
        spec: the job; its `model.compile_cache` is where compiled code is mounted.
        model_claim: PersistentVolumeClaim of downloaded models; without one each pod downloads.
        compile_claim: PersistentVolumeClaim of compiled code; without one each pod compiles.
        shared_memory: size of `/dev/shm`, whose default of 64 MiB is too small for several GPUs.
    """
    scratch = k8s.V1Volume(name="batchinfer-scratch", empty_dir=k8s.V1EmptyDirVolumeSource())
    pairs = [
        (_cache("batchinfer-model-cache", model_claim), MODEL_CACHE),
        (_cache("batchinfer-compile-cache", compile_claim), spec.model.compile_cache or COMPILE_CACHE),
        (scratch, SCRATCH),
    ]
    if shared_memory:
        memory = k8s.V1EmptyDirVolumeSource(medium="Memory", size_limit=shared_memory)
        pairs.append((k8s.V1Volume(name="batchinfer-shared-memory", empty_dir=memory), "/dev/shm"))
    return [(k8s.V1VolumeMount(name=volume.name, mount_path=path), volume) for volume, path in pairs]


def environment(spec: JobSpec) -> list[k8s.V1EnvVar]:
    """Where libraries put what they would else write below the home folder of a read-only root, and a name
    for a user who has none in the image."""
    compiled = spec.model.compile_cache or COMPILE_CACHE
    variables = {
        "HOME": SCRATCH,
        "USER": "batchinfer",
        "HF_HOME": f"{MODEL_CACHE}/huggingface",
        "VLLM_CACHE_ROOT": compiled,
        "TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor",
        "TRITON_CACHE_DIR": f"{compiled}/triton",
        "FLASHINFER_WORKSPACE_BASE": compiled,
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return [k8s.V1EnvVar(name=name, value=value) for name, value in variables.items()]


def pod_security() -> k8s.V1PodSecurityContext:
    """Fits the Pod Security Standard `restricted`; the group owns the volumes."""
    return k8s.V1PodSecurityContext(
        run_as_non_root=True,
        run_as_user=10001,
        run_as_group=10001,
        fs_group=10001,
        fs_group_change_policy="OnRootMismatch",
        seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
    )


def container_security() -> k8s.V1SecurityContext:
    """No privileges to gain, nothing of the image to change."""
    return k8s.V1SecurityContext(
        allow_privilege_escalation=False,
        read_only_root_filesystem=True,
        capabilities=k8s.V1Capabilities(drop=["ALL"]),
    )


def _cache(name: str, claim: str | None) -> k8s.V1Volume:
    if claim is None:
        return k8s.V1Volume(name=name, empty_dir=k8s.V1EmptyDirVolumeSource())
    source = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=claim)
    return k8s.V1Volume(name=name, persistent_volume_claim=source)
