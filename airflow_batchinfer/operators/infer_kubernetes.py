"""`BatchInferPodOperator`: run a bundle of shards in a pod that may vanish at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.cncf.kubernetes.backcompat.backwards_compat_converters import convert_env_vars
from airflow.providers.cncf.kubernetes.operators.pod import (
    POD_IDENTIFIER_STATE_KEY,
    KubernetesPodOperator,
)
from airflow.providers.cncf.kubernetes.utils.pod_manager import PodLaunchTimeoutException, PodPhase
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from kubernetes.client import models as k8s
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from airflow_batchinfer.errors import BatchInferError, SpecError, WorkerLostError
from airflow_batchinfer.operators import pod_shape
from airflow_batchinfer.operators.bundle import Bundle
from airflow_batchinfer.operators.pod_fate import Fate, PodEnd, fate_of
from airflow_batchinfer.operators.pod_patience import (
    API_PATIENCE_SECONDS,
    STUCK_SECONDS,
    PatientPodManager,
    await_first_answer,
    is_outage,
    outlast_outage,
    scheduled_at,
)
from airflow_batchinfer.operators.pod_template import read_template
from airflow_batchinfer.operators.pod_trigger import BatchInferPodTrigger
from airflow_batchinfer.operators.retry import FailureRetryPolicy
from airflow_batchinfer.operators.shard_work import ShardWork, worker_error
from airflow_batchinfer.operators.task_label import labelled
from airflow_batchinfer.run.launch import Launch, reclaims_of
from airflow_batchinfer.run.layout import RunLayout

if TYPE_CHECKING:
    from airflow.sdk import Context

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_WORK_LABEL = "batchinfer-work"
"""`ShardWork.identity`: Airflow's own labels are the same for a run planned anew, and for another Airflow's
run of the same DAG and date."""
_POD_TROUBLE = (AirflowException, ApiException, HTTPError)
"""What KubernetesPodOperator raises when a pod ends badly, is gone, or cannot be asked."""
_OWN_DEFAULTS: dict[str, Any] = {
    "deferrable": True,
    "schedule_timeout_seconds": 6 * 3600,
    "startup_timeout_seconds": 1800,
    "poll_interval": 10,
    "log_events_on_startup": False,
    "log_pod_spec_on_failure": False,
    "termination_message_policy": "FallbackToLogsOnError",
    "automount_service_account_token": False,
}
"""Where this operator differs from KubernetesPodOperator; docs/kubernetes.md says why."""
_REMEDIES = {
    Fate.OOM_KILLED: "raise the memory of `container_resources`",
    Fate.EVICTED: "request as much memory and ephemeral storage as the worker uses in `container_resources`",
    Fate.IMAGE_ERROR: "check `image` and `image_pull_secrets`",
    Fate.CONFIG_ERROR: "check the secrets, config maps, volume claims and command that the pod refers to",
    Fate.LAUNCH_TIMEOUT: "see the pod's events: is there a node pool that fits, is its quota used up?",
    Fate.DEADLINE: "raise `execution_timeout` or `active_deadline_seconds`, or make shards smaller",
}


class BatchInferPodOperator(KubernetesPodOperator):
    """Run one pod until each shard of the bundle has a commit.

    Success needs the commits, whatever the pod or Airflow says. A reclaimed pod is launched again at
    once, without using up a retry of the task, `retry.reclaims` times at most in one try; the count is
    kept in the store. All arguments of KubernetesPodOperator are passed through and win over what is
    filled in here, and so does a pod template; only `arguments` are always the worker's own.

    Args:
        bundle: which shards, from split's list.
        store_conn_id: AWS connection by which Airflow's side reads an `s3://` store. The pod does not
            get it: it has an identity of its own (`service_account_name`) or `store_secret`.
        store_secret: Kubernetes secret with `AWS_ACCESS_KEY_ID` and the like, put into the pod's
            environment.
        worker_python: the image's Python that has the worker.
        gpus: GPUs of the pod; default: what the engine's own arguments ask for.
        gpu_resource: the device plugin's name of a GPU.
        spot: see `pod_shape.Spot`.
        model_cache: PersistentVolumeClaim that keeps downloaded models between pods.
        compile_cache: PersistentVolumeClaim that keeps compiled code between pods.
        shared_memory: size of `/dev/shm` when a pod has several GPUs.
        kueue_queue: Kueue's local queue; Kueue then holds the pod until there is quota.
        stuck_timeout_seconds: how long the pod may be stuck on an image that cannot be pulled, or on a
            secret, config map or volume claim that is not there.
    """

    def __init__(
        self,
        *,
        bundle: Bundle,
        store_conn_id: str | None = None,
        store_secret: str | None = None,
        worker_python: str = "python3",
        gpus: int | None = None,
        gpu_resource: str = "nvidia.com/gpu",
        spot: pod_shape.Spot = "prefer",
        model_cache: str | None = None,
        compile_cache: str | None = None,
        shared_memory: str = "8Gi",
        kueue_queue: str | None = None,
        stuck_timeout_seconds: float = STUCK_SECONDS,
        **kwargs: Any,
    ) -> None:
        """See the class; the rest are KubernetesPodOperator's arguments."""
        if kwargs.get("do_xcom_push"):
            raise SpecError("`do_xcom_push`: the sidecar hides why a pod ended; results are in the store")
        kwargs["retry_policy"] = kwargs.get("retry_policy") or FailureRetryPolicy()
        given = {*kwargs, *kwargs.get("default_args", {})}  # Airflow has put the DAG's `default_args` in
        own = {name: value for name, value in _OWN_DEFAULTS.items() if name not in given}
        super().__init__(**kwargs | own | {"do_xcom_push": False})
        self.bundle = bundle
        self.store_conn_id = store_conn_id
        self.store_secret = store_secret
        self.worker_python = worker_python
        self.gpus = gpus
        self.gpu_resource = gpu_resource
        self.spot = spot
        self.model_cache = model_cache
        self.compile_cache = compile_cache
        self.shared_memory = shared_memory
        self.stuck_timeout_seconds = stuck_timeout_seconds
        if kueue_queue is not None:
            self.labels = {**self.labels, _QUEUE_LABEL: kueue_queue}
        self._work: ShardWork | None = None
        self._seen: k8s.V1Pod | None = None
        self._overdue: Fate | None = None
        self._reached = False  # whether the cluster has ever answered this task
        self._environment: list[k8s.V1EnvVar] = []

    # Airflow calls `execute` and `trigger_reentry`; KubernetesPodOperator calls the others.

    def execute(self, context: Context) -> None:
        """Launch a pod, or find the one that is already there; nothing if all is committed.

        Raises what `worker_error` gives for the worker's exit code, and `WorkerLostError` naming the
        pod's fate otherwise.
        """
        with labelled(context, self.bundle):
            self._reached = _has_had_a_pod(context)
            work = self._open_work()
            if work.open_shards():
                self._fill_in(work)
                super().execute(context)
            else:
                self._put_away_leftovers(context, work)
                self._tell_summary(work)

    def defer(self, *, trigger: Any, **kwargs: Any) -> NoReturn:
        """As every operator, with the trigger of our own."""
        stuck_timeout = self.stuck_timeout_seconds
        super().defer(trigger=BatchInferPodTrigger.like(trigger, stuck_timeout=stuck_timeout), **kwargs)

    @cached_property
    def pod_manager(self) -> PatientPodManager:
        """What it creates, reads and waits for pods with."""
        return PatientPodManager(
            kube_client=self.client,
            callbacks=self.callbacks,
            stuck_timeout=self.stuck_timeout_seconds,
            container=self.base_container_name,
        )

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> None:
        """The triggerer saw the pod end, or could not see it: judge by the commits."""
        with labelled(context, self.bundle):
            work = self._open_work()
            if not self._environment:  # a fresh operator; not so if the pod ended before it was watched
                self._fill_in(work)
            self._reached = True
            self._seen, self._overdue = None, _limit_over(event)
            # KubernetesPodOperator's own reading is not patient.
            pod = self._read_pod(event["name"], event["namespace"])
            if pod is not None and self._overdue == Fate.LAUNCH_TIMEOUT and self._has_time_yet(pod):
                self.log.info("pod %s got its node after all; watching on", event["name"])
                self.pod = pod
                self.invoke_defer_method(context=context)  # raises `TaskDeferred`
            trouble = self._trouble_of(super().trigger_reentry, context, event)
            if not self._settle(context, work, event["name"], event["namespace"], trouble):
                self._aim_anew(work)
                self.execute_async(context)

    def execute_sync(self, context: Context) -> None:
        """Watch pods from this process until the shards are committed."""
        assert self._work is not None
        while True:
            self._seen, self._overdue = None, None
            trouble = self._trouble_of(super().execute_sync, context)
            if self.pod is None:  # there never was one
                raise trouble or WorkerLostError("no pod was launched")
            name, namespace = self.pod.metadata.name, self.pod.metadata.namespace
            if self._settle(context, self._work, name, namespace, trouble):
                return
            self._aim_anew(self._work)

    def await_pod_start(self, pod: k8s.V1Pod) -> None:
        """As KubernetesPodOperator, keeping in mind whether its patience ended."""
        try:
            super().await_pod_start(pod)
        except PodLaunchTimeoutException:
            self._overdue = Fate.LAUNCH_TIMEOUT
            raise

    def get_or_create_pod(self, pod_request_obj: k8s.V1Pod, context: Context) -> k8s.V1Pod:
        """As KubernetesPodOperator, but a pod that has ended is never taken for this try's."""
        assert self._work is not None
        for pod in self._ask(self._pods_of_task, context, pod_request_obj.metadata.namespace):
            if pod.status.phase in PodPhase.terminal_states:
                self._put_away(pod, self._end_of(pod), context, self._work)
        try:
            return super().get_or_create_pod(pod_request_obj, context)
        except ApiException as error:
            if error.status == 403 and "exceeded quota" in str(error.body):
                raise WorkerLostError(
                    f"the namespace's quota is used up: {error.body} (lower `max_parallel_shards` "
                    "or the pool's slots below it, or have Kueue queue the pods)"
                ) from error
            if error.status in (400, 403, 422):
                raise SpecError(f"the cluster refuses the pod: {error.body}") from error
            raise

    def cleanup(self, pod: k8s.V1Pod, remote_pod: k8s.V1Pod, *args: Any, **kwargs: Any) -> None:
        """Look at the pod once more before it is deleted: its status tells what became of it.

        One that lives on, because only the watching failed, is left to be found by the next try.
        """
        if pod is None:
            return
        self._seen = self._read_pod(pod.metadata.name, pod.metadata.namespace)
        if self._seen is not None and self._end_of(self._seen).fate != Fate.RUNNING:
            super().cleanup(pod, self._seen, *args, **kwargs)

    def process_pod_deletion(self, pod: k8s.V1Pod, *, reraise: bool = True) -> bool:
        """As KubernetesPodOperator, but `on_finish_action` keeps only pods that have ended: nobody watches
        this one any more. Given up it may start yet, and a sidecar may hold its GPU for ever."""
        if pod.status.phase in PodPhase.terminal_states:
            return bool(super().process_pod_deletion(pod, reraise=reraise))
        self.log.info("Deleting pod: %s", pod.metadata.name)
        try:
            self.pod_manager.delete_pod(pod)
        except _POD_TROUBLE:
            if reraise:
                raise
            self.log.exception("pod %s could not be deleted", pod.metadata.name)
            return False
        return True

    def _get_pod_from_task_state_store(self, context: Context) -> k8s.V1Pod | None:
        """As KubernetesPodOperator, but not a pod at other shards: its run has been planned anew since."""
        pod = super()._get_pod_from_task_state_store(context)
        if pod is not None and pod.metadata.labels.get(_WORK_LABEL) != self.labels[_WORK_LABEL]:
            self.log.info("pod %s works at another plan's shards, and is deleted", pod.metadata.name)
            self.patch_already_checked(pod, reraise=False)
            self.pod_manager.delete_pod(pod)
            return None
        return pod

    def _write_logs(  # type: ignore[override]  # its retries stay with the base's
        self, pod: k8s.V1Pod, follow: bool = False, since_time: Any = None
    ) -> None:
        """As KubernetesPodOperator, but a pod whose time is over is not followed to its end: it may hang."""
        super()._write_logs(pod, follow=follow and not self._overdue, since_time=since_time)

    def _open_work(self) -> ShardWork:
        if self.store_conn_id is not None:
            from airflow_batchinfer.operators.store import use_connection

            use_connection(self.store_conn_id)
        self._work = ShardWork.open(self.bundle)
        return self._work

    def _fill_in(self, work: ShardWork) -> None:
        """Give the pod what the plan decides and the user said neither here nor in a pod template."""
        spec = work.plan.spec
        gpus = pod_shape.gpus_of(spec) if self.gpus is None else self.gpus
        template = read_template(self.pod_template_file, self.pod_template_dict, self.full_pod_spec)
        said, worker = template.spec, template.spec.containers[0]
        self.labels = {**self.labels, _WORK_LABEL: work.identity()}
        self.name = self.name or template.metadata.name or f"batchinfer-{work.plan.job}-{work.shards[0]:05d}"
        self.cmds = self.cmds or worker.command or [self.worker_python, "-m", "airflow_batchinfer.worker"]
        self.arguments = work.worker_arguments(work.open_shards())
        self.container_resources = pod_shape.resources(
            self.container_resources or worker.resources, self.gpu_resource, gpus
        )
        self.tolerations = [
            *(self.tolerations or said.tolerations or []),
            *pod_shape.tolerations(self.spot, self.gpu_resource),
        ]
        self.affinity = self.affinity or said.affinity or pod_shape.affinity(self.spot)
        self.security_context = self.security_context or said.security_context or pod_shape.pod_security()
        self.container_security_context = (
            self.container_security_context or worker.security_context or pod_shape.container_security()
        )
        if self.termination_grace_period is None:
            self.termination_grace_period = said.termination_grace_period_seconds
        if self.termination_grace_period is None:
            self.termination_grace_period = pod_shape.grace_seconds(spec)
        if self.active_deadline_seconds is None:
            self.active_deadline_seconds = said.active_deadline_seconds
        if self.active_deadline_seconds is None and self.execution_timeout is not None:
            # Airflow's own end comes first, also of the last try, which may have taken the pod up from the
            # first. A pod that nobody can end any more ends by itself.
            tries = (self.retries or 0) + 1
            seconds = tries * self.execution_timeout.total_seconds() + API_PATIENCE_SECONDS
            self.active_deadline_seconds = int(seconds)
        if self.store_secret is not None:
            reference = k8s.V1SecretEnvSource(name=self.store_secret)
            self.env_from = [*self.env_from, k8s.V1EnvFromSource(secret_ref=reference)]
        taken = {mount.mount_path for mount in [*self.volume_mounts, *(worker.volume_mounts or [])]}
        volumes = pod_shape.volumes(
            spec, self.model_cache, self.compile_cache, self.shared_memory if gpus > 1 else None
        )
        for mount, volume in volumes:
            if mount.mount_path not in taken:
                self.volume_mounts = [*self.volume_mounts, mount]
                self.volumes = [*self.volumes, volume]
        given = convert_env_vars(self.env_vars) if self.env_vars else []
        names = {variable.name for variable in [*given, *(worker.env or [])]}
        self._environment = [*given, *(v for v in pod_shape.environment(spec) if v.name not in names)]
        self.env_vars = list(self._environment)

    def _pods_of_task(self, context: Context, namespace: str) -> list[k8s.V1Pod]:
        selector = self._build_find_pod_label_selector(context)
        pods: list[k8s.V1Pod] = self.client.list_namespaced_pod(namespace, label_selector=selector).items
        return pods

    def _put_away(self, pod: k8s.V1Pod, end: PodEnd, context: Context, work: ShardWork) -> None:
        """Record what became of a pod whose end no try saw, and have no try take it for its own."""
        self._record(pod.metadata.name, end, context, work)
        if not self.process_pod_deletion(pod, reraise=False):
            self.patch_already_checked(pod, reraise=False)

    def _put_away_leftovers(self, context: Context, work: ShardWork) -> None:
        """All is committed, so whatever pod an earlier try left behind has nothing to do any more."""
        self._fill_in(work)
        self.name = self._set_name(self.name)
        try:
            request = self.build_pod_request_obj(context)
            for pod in self._pods_of_task(context, request.metadata.namespace):
                end = self._end_of(pod)
                if end.fate == Fate.RUNNING:  # it has written its commits and is about to leave
                    end = replace(end, fate=Fate.COMMITTED)
                self._put_away(pod, end, context, work)
        except _POD_TROUBLE as error:  # the rows are safe; a pod that has ended holds no GPU
            self.log.warning("could not look for pods of earlier tries: %s", error)

    def _aim_anew(self, work: ShardWork) -> None:
        """Have the next launch build a pod of a new name, for the shards that are still open."""
        self.pod = self.remote_pod = self.pod_request_obj = None
        self.arguments = work.worker_arguments(work.open_shards())
        self.env_vars = list(self._environment)  # building a pod appends to the list

    def _trouble_of(self, call: Any, *arguments: Any) -> Exception | None:
        """Call KubernetesPodOperator; what it raised about the pod, if anything."""
        try:
            call(*arguments)
        except (AirflowSkipException, AirflowFailException):
            raise
        except _POD_TROUBLE as error:
            return error
        return None

    def _settle(
        self, context: Context, work: ShardWork, pod: str, namespace: str, trouble: Exception | None
    ) -> bool:
        """Whether the bundle is complete; if not, another pod is to be launched.

        Raises:
            BatchInferError: it is not complete, and what to do is for Airflow or a person to decide.
        """
        seen = self._seen or self._read_pod(pod, namespace)
        end = self._end_of(seen)
        self.log.info("pod %s on node %s: %s %s", pod, end.node, end.fate, end.message)
        if end.fate == Fate.RUNNING:
            raise WorkerLostError(f"pod {pod} runs on, and the next try finds it again: {trouble}")
        launch = self._record(pod, end, context, work)
        if seen is not None and seen.metadata.deletion_timestamp:
            self.patch_already_checked(seen, reraise=False)  # it shows as running while its node is lost
        if not work.open_shards():
            self._tell_summary(work)
            return True
        if self._killed:
            raise WorkerLostError("Airflow ended this task; finished rows are in the store's parts")
        if end.fate == Fate.COMMITTED:
            work.check_committed()
        if end.fate != Fate.RECLAIMED:
            raise _error_of(pod, end, trouble) from trouble
        limit = work.plan.spec.retry.reclaims
        used = reclaims_of(work.store, RunLayout(work.plan.folder), work.shards[0], launch.try_number)
        if used > limit:
            raise WorkerLostError(f"reclaimed {used} times, `retry.reclaims` is {limit}") from trouble
        self.log.warning("launching another pod; reclaimed %d times of at most %d", used, limit)
        return False

    def _record(self, pod: str, end: PodEnd, context: Context, work: ShardWork) -> Launch:
        launch = Launch(
            pod=pod,
            shards=work.shards,
            try_number=context["ti"].try_number,
            fate=end.fate,
            message=end.message,
            node=end.node,
            exit_code=end.exit_code,
            ended_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        launch.record(work.store, RunLayout(work.plan.folder))
        return launch

    def _end_of(self, pod: k8s.V1Pod | None) -> PodEnd:
        pending = pod is not None and pod.status.phase == PodPhase.PENDING
        missing = self.pod_manager.missing_mount(pod) if self._overdue and pending else None
        return fate_of(pod, self.base_container_name, overdue=self._overdue, missing_mount=missing)

    def _has_time_yet(self, pod: k8s.V1Pod) -> bool:
        """Whether a pod that was given up got its node while this task waited for a slot of Airflow's."""
        fate = self._end_of(pod).fate
        since = scheduled_at(pod)
        if fate != Fate.LAUNCH_TIMEOUT or since is None:
            return fate == Fate.RUNNING
        return datetime.now(UTC) - since < timedelta(seconds=self.startup_timeout_seconds)

    def _read_pod(self, name: str, namespace: str) -> k8s.V1Pod | None:
        try:
            return self._ask(self.hook.get_pod, name, namespace)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that reads from the API server, and wait for one that does not answer."""
        patient = outlast_outage if self._reached else await_first_answer
        try:
            answer = patient(question)(*arguments)
        except Exception as error:
            if not is_outage(error):
                raise
            meaning = (
                "a pod of this task, if there is one, runs on, and the next try finds it again"
                if self._reached
                else "it has never answered this task: check the address and certificate in the connection "
                "or kubeconfig, and whether Airflow's workers reach it"
            )
            reason = getattr(error, "reason", None) or error
            raise WorkerLostError(f"the Kubernetes API does not answer; {meaning}: {reason}") from error
        self._reached = True
        return answer

    def _tell_summary(self, work: ShardWork) -> None:
        for line in work.summary():
            self.log.info(line)


def _has_had_a_pod(context: Context) -> bool:
    state = context.get("task_state_store")
    return state is not None and state.get(POD_IDENTIFIER_STATE_KEY) is not None


def _limit_over(event: dict[str, Any]) -> Fate | None:
    """Which time limit the trigger tells of, if any; it has one word for all of them."""
    if event["status"] != "timeout":
        return None
    deadline: float | None = event.get("_execution_deadline")  # KubernetesPodOperator's `execution_timeout`
    return Fate.DEADLINE if deadline is not None and time.time() >= deadline else Fate.LAUNCH_TIMEOUT


_OWN_WORDS = {
    Fate.BAD_SPEC,
    Fate.BAD_INPUT,
    Fate.ENGINE_FAILED,
    Fate.STORE_FAILED,
    Fate.STOPPED,
    Fate.OTHER_RELEASE,
}
"""Fates in which the worker itself has said what is wrong."""


def _error_of(pod: str, end: PodEnd, trouble: Exception | None) -> BatchInferError:
    """The error a fate stands for: the worker's own, or the loss of the worker by the fate's name."""
    if end.fate in _OWN_WORDS:
        assert end.exit_code is not None
        return worker_error(end.exit_code, end.message)
    said = end.message or str(trouble or "")
    remedy = _REMEDIES.get(end.fate)
    return WorkerLostError(f"{end.fate}: pod {pod}: {said}" + (f" ({remedy})" if remedy else ""))
