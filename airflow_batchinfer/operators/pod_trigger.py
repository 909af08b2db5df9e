"""The trigger that watches a worker's pod: news not too early for Airflow, and patience of our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from airflow.providers.cncf.kubernetes.triggers.pod import KubernetesPodTrigger
from airflow.triggers.base import TriggerEvent

from airflow_batchinfer.operators.pod_patience import (
    STUCK_SECONDS,
    AsyncPatientPodManager,
    outlast_outage,
    unless_lost,
)

if TYPE_CHECKING:
    from kubernetes.client.models import V1Pod

QUIET_SECONDS = 10.0
"""How long after its start a trigger keeps its news to itself."""


class BatchInferPodTrigger(KubernetesPodTrigger):
    """KubernetesPodTrigger that never fires within its first `QUIET_SECONDS`.

    Airflow's executors know a deferred task and its resumption by the same key. If the resumption is
    launched before the scheduler has read that the deferring process ended, it takes that end for the
    resumption's, finds the task running, and fails it: "executor reported that the task instance finished
    with state success, but the task instance's state attribute is running" (`process_executor_events` of
    Airflow 3.3's scheduler). A retry is lost although nothing is wrong. A pod that ends at once is rare,
    and ten seconds are nothing to a shard.

    Args:
        stuck_timeout: see `StartWatch`.
        kwargs: KubernetesPodTrigger's arguments.
    """

    def __init__(self, *, stuck_timeout: float = STUCK_SECONDS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stuck_timeout = stuck_timeout

    @classmethod
    def like(cls, trigger: KubernetesPodTrigger, *, stuck_timeout: float) -> Self:
        """A trigger with the same arguments."""
        return cls(**trigger.serialize()[1], stuck_timeout=stuck_timeout)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """This class's path and arguments."""
        arguments = super().serialize()[1] | {"stuck_timeout": self.stuck_timeout}
        return f"{__name__}.{type(self).__name__}", arguments

    @cached_property
    def pod_manager(self) -> AsyncPatientPodManager:
        """What it reads the pod with."""
        return AsyncPatientPodManager(
            async_hook=self.hook, stuck_timeout=self.stuck_timeout, container=self.base_container_name
        )

    @outlast_outage
    async def _get_pod(self) -> V1Pod:
        return unless_lost(await super()._get_pod())

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """As KubernetesPodTrigger, but not at once."""
        began = time.monotonic()
        async for event in super().run():
            await asyncio.sleep(max(0.0, QUIET_SECONDS - (time.monotonic() - began)))
            yield event
