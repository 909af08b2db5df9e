"""`JudgePilotOperator`: the gate between the pilot and the fleet, with a person's approval if asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.standard.exceptions import HITLRejectException, HITLTimeoutError
from airflow.providers.standard.operators.hitl import ApprovalOperator

from airflow_batchinfer.errors import GateError
from airflow_batchinfer.operators.base import RunOperator
from airflow_batchinfer.operators.bundle import Bundle, bundles_of, max_mapped_tasks

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_batchinfer.pipeline.pilot import PilotVerdict
    from airflow_batchinfer.store import Store


class JudgePilotOperator(RunOperator, ApprovalOperator):
    """Judge the pilot by the job's `gate`; return the fleet's bundles for the infer tasks.

    With `gate.approval: required`, a pilot that passed waits for a person: the request holds the pilot's
    figures and the report's address. "Reject" fails the task for good, and so does no answer within
    `response_timeout`. Nothing of it is templated, so prompts that look like Jinja stay text. Where each of
    the fleet's shards has its commit, nothing is left to pay, and nobody is asked. An `execution_timeout` of
    the DAG's `default_args` does not count: ApprovalOperator would take it for `response_timeout`.

    Args:
        split_task_id: see `RunOperator`.
        kwargs: arguments of `ApprovalOperator`: `notifiers`, `assigned_users`, `response_timeout`.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("execution_timeout", None)
        super().__init__(subject="Start the fleet?", fail_on_reject=True, **kwargs)

    def execute(self, context: Context) -> list[Bundle]:
        """Judge, and ask if need be. Raises `GateError`, `IncompleteRunError`."""
        from airflow_batchinfer.pipeline.pilot import judge_pilot

        store, folder = self.open_run(context)
        try:
            verdict = judge_pilot(store, folder)
        except GateError:
            try:
                self._report(store, folder)
            except Exception:  # the gate's word is what ends the task, whatever is wrong with the report
                self.log.exception("the report could not be written")
            raise
        report = self._report(store, folder)
        self.log.info(verdict.message)
        if verdict.approval == "required" and self._is_anything_left_to_pay(store, folder):
            self.subject = f"Start the fleet of {folder}?"
            self.body = _request(verdict, report)
            if not self._is_shown(context):
                raise GateError(
                    f"{verdict.message} A person has to approve it, and would be shown an earlier request "
                    "with other figures: Airflow keeps the first that a run's task makes. Start a new run; "
                    f"or read {report}, and if it is good, set `gate.approval: none` and clear split with "
                    "downstream: the pilot's rows are not paid again"
                )
            super().execute(context)  # parks the task: it goes on in `execute_complete`
        return self._fleet(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> list[Bundle]:
        """Go on with a person's answer. Raises `GateError` on "Reject", or if nobody answered in time."""
        try:
            super().execute_complete(context, event)
        except HITLRejectException as error:  # as it stands, Airflow would retry, and ask again
            user = event["responded_by_user"]
            raise GateError(
                f"{user['name'] if user else 'somebody'} rejected the pilot, so the fleet does not start: "
                f"fix the job and start a new run, or clear `{self.task_id}` to be asked again"
            ) from error
        except HITLTimeoutError as error:
            raise GateError(
                f"nobody answered within `response_timeout` ({self.response_timeout}), so the fleet does "
                f"not start: clear `{self.task_id}` to be asked again"
            ) from error
        return self._fleet(context)

    def _is_shown(self, context: Context) -> bool:
        """Hand in the request; whether people see it. A cleared task keeps the request that it made before,
        though its pilot may be another one now, and nothing that a task may do replaces it."""
        from airflow.sdk.execution_time.comms import CreateHITLDetailPayload, HITLDetailRequestResult
        from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

        # As `upsert_hitl_detail`, which does not say what the API server answers.
        request = {
            "ti_id": context["task_instance"].id,
            "options": self.options,
            "subject": self.subject,
            "body": self.body,
            "defaults": self.defaults,
            "params": self.serialized_params,
            "multiple": self.multiple,
            "assigned_users": self.assigned_users or [],
        }
        shown = SUPERVISOR_COMMS.send(CreateHITLDetailPayload.model_validate(request))
        assert isinstance(shown, HITLDetailRequestResult)
        return (shown.subject, shown.body) == (self.subject, self.body)

    def _is_anything_left_to_pay(self, store: Store, folder: str) -> bool:
        """Whether a shard of the fleet has no commit."""
        from airflow_batchinfer.pipeline.split import load_plan
        from airflow_batchinfer.run.commit import chosen_commit
        from airflow_batchinfer.run.layout import RunLayout

        plan, layout = load_plan(store, folder), RunLayout(folder)
        fleet = [s.shard for s in plan.shards if not s.pilot]
        # Where the pilot was all of the input, the question is whether to publish it.
        if not fleet or any(chosen_commit(store, layout, s, plan.fingerprint) is None for s in fleet):
            return True
        self.log.info("nobody is asked: each of the fleet's shards has its commit")
        return False

    def _report(self, store: Store, folder: str) -> str:
        """Write the report; its address."""
        from airflow_batchinfer.pipeline.report import write_report
        from airflow_batchinfer.run.layout import RunLayout

        write_report(store, folder)
        report = store.uri_of(RunLayout(folder).report("html"))
        self.log.info("report: %s", report)
        return report

    def _fleet(self, context: Context) -> list[Bundle]:
        from airflow_batchinfer.pipeline.split import load_plan

        store, folder = self.open_run(context)
        plan = load_plan(store, folder)
        fleet = [s for s in plan.shards if not s.pilot]
        return bundles_of(store, plan, max_mapped_tasks(), fleet)


def _request(verdict: PilotVerdict, report: str) -> str:
    """The request's Markdown. Row text goes into code blocks longer than any fence it holds."""
    lines = [verdict.message, "", f"Report: `{report}`", "", "| check | found | required |", "|---|---|---|"]
    lines += [f"| {c.name} | {c.observed} | {c.required} |" for c in verdict.checks]
    for row in verdict.worst[:3]:
        lines += ["", f"Row {row.row_id}: {row.outcome}{f', {row.reason}' if row.reason else ''}", ""]
        texts = [f"[{m['role']}]\n{m['content']}" for m in row.prompt] + [f"[answer]\n{row.output or ''}"]
        lines += ["    " + line for text in texts for line in text.splitlines()]
    return "\n".join(lines)
