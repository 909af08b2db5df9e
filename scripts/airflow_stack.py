"""A real Airflow of one's own: api-server, scheduler and dag-processor on SQLite, with a REST client.

`make demo` and the integration tests run on it. `SETTINGS` keeps to what SQLite stands without
errors: few tasks at once, and patient clients (docs/airflow.md says when to move to PostgreSQL).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO
from urllib.parse import quote

import httpx

from scripts.ports import free_port

SETTINGS = {
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__PARALLELISM": "4",
    "AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG": "4",
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    "AIRFLOW__API__WORKERS": "1",
    "AIRFLOW__API__HOST": "127.0.0.1",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",  # a file that changes is parsed at once
    "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
    "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "12",
}
"""Safe on SQLite: four tasks at once, one api worker, a minute for a locked database to come free."""

_COMPONENTS = ("api-server", "scheduler", "dag-processor")
_READING_SECONDS = 6.0
_FINISHED = frozenset({"success", "failed"})


class StackError(Exception):
    """Airflow did not start, died, or took too long: says which part, with the end of its log."""


class AirflowApi:
    """The few calls of Airflow's public REST API (v2) that driving a run takes."""

    def __init__(self, url: str, check: Callable[[], None] = lambda: None) -> None:
        """Talk to the api-server at `url`; `check` is called while waiting and may raise."""
        self.url = url.rstrip("/")
        self._check = check
        self._client = httpx.Client(base_url=self.url, timeout=60.0)

    def login(self) -> None:
        """Get a token from the simple auth manager; everybody is admin."""
        token = self._client.get("/auth/token").raise_for_status().json()["access_token"]
        self._client.headers["Authorization"] = f"Bearer {token}"

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        """One call below `/api/v2`; its JSON. Raises `httpx.HTTPStatusError` with the answer's text."""
        answer = self._client.request(method, f"/api/v2{path}", **arguments)
        if answer.is_error:
            raise httpx.HTTPStatusError(
                f"{method} {path}: {answer.status_code}: {answer.text}",
                request=answer.request,
                response=answer,
            )
        return answer.json() if answer.content else None

    def healthy(self) -> bool:
        """Whether api-server, database, scheduler and dag-processor all report in."""
        try:
            health = self.call("GET", "/monitor/health")
        except (httpx.HTTPError, ValueError):
            return False
        return all(
            health[part]["status"] == "healthy" for part in ("metadatabase", "scheduler", "dag_processor")
        )

    def wait_for_dag(self, dag_id: str, timeout: float = 120.0) -> None:
        """Wait until the DAG is parsed. Raises `StackError` with the import errors if it never is."""

        def parsed() -> bool:
            return any(dag["dag_id"] == dag_id for dag in self.call("GET", "/dags?limit=200")["dags"])

        if not self._poll(parsed, timeout):
            errors = self.call("GET", "/importErrors")["import_errors"]
            raise StackError(f"DAG {dag_id} was not parsed within {timeout:.0f} s: {errors}")

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None) -> str:
        """Start a run; its id."""
        body: dict[str, Any] = {"logical_date": None, "conf": dict(conf or {})}
        if run_id is not None:
            body["dag_run_id"] = run_id
        run: dict[str, str] = self.call("POST", f"/dags/{dag_id}/dagRuns", json=body)
        return run["dag_run_id"]

    def fail_unfinished(self, dag_id: str) -> list[str]:
        """Mark runs that an interrupted Airflow left unfinished as failed, or it would go on with them."""
        path = f"/dags/{dag_id}/dagRuns"
        found = self.call("GET", path, params={"state": ["queued", "running"], "limit": 100})["dag_runs"]
        for run in found:
            self.call("PATCH", f"{path}/{quote(run['dag_run_id'], safe='')}", json={"state": "failed"})
        return [run["dag_run_id"] for run in found]

    def run_state(self, dag_id: str, run_id: str) -> str:
        """The run's state."""
        state: str = self.call("GET", f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}")["state"]
        return state

    def wait(self, dag_id: str, run_id: str, timeout: float = 600.0) -> str:
        """Wait until the run is over; `success` or `failed`."""
        if not self._poll(lambda: self.run_state(dag_id, run_id) in _FINISHED, timeout):
            raise StackError(
                f"run {run_id} of {dag_id} is not over after {timeout:.0f} s: {self.states(dag_id, run_id)}"
            )
        return self.run_state(dag_id, run_id)

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """The run's task instances, as the API gives them."""
        path = f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances"
        found: list[dict[str, Any]] = []
        while True:  # a page holds 100 at most, whatever is asked for
            page = self.call("GET", path, params={"limit": 100, "offset": len(found), "order_by": "id"})
            found += page["task_instances"]
            if len(found) >= page["total_entries"] or not page["task_instances"]:
                return found

    def states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """State by task; mapped ones as `infer[3]`."""
        return {task_name(task): task["state"] for task in self.tasks(dag_id, run_id)}

    def wait_for_task(
        self, dag_id: str, run_id: str, name: str, states: Iterable[str], timeout: float = 300.0
    ) -> None:
        """Wait until the task `name` (`infer[3]`) is in one of `states`."""
        wanted = set(states)
        if not self._poll(lambda: self.states(dag_id, run_id).get(name) in wanted, timeout):
            raise StackError(f"{name} is in none of {sorted(wanted)}: {self.states(dag_id, run_id)}")

    def clear(self, dag_id: str, run_id: str, task_ids: list[Any] | None = None, **options: Any) -> list[str]:
        """Clear what failed, with all that comes after: what the UI's dialog sends. Names of the cleared.

        `task_ids` holds task ids or `[task id, map index]`; `options` go into the body as they are.
        """
        body: dict[str, Any] = {
            "dry_run": False,
            "dag_run_id": run_id,
            "only_failed": True,
            "include_downstream": True,
            "reset_dag_runs": True,
            **options,
        }
        if task_ids is not None:
            body["task_ids"] = task_ids
        answer = self.call("POST", f"/dags/{dag_id}/clearTaskInstances", json=body)
        return [task_name(task) for task in answer["task_instances"]]

    def set_state(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        """Mark a task instance by hand, as the UI does."""
        index = "" if map_index < 0 else f"/{map_index}"
        path = f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances/{task_id}{index}"
        self.call("PATCH", path, json={"new_state": state})

    def log(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, attempt: int | None = None
    ) -> str:
        """A task's log as text, one event a line; of its last attempt if `attempt` is not given."""
        events = self.log_events(dag_id, run_id, task_id, map_index, attempt)
        return "\n".join(_event_line(event) for event in events)

    def log_events(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, attempt: int | None = None
    ) -> list[Any]:
        """A task's log as the API gives it: mappings with `event`, `level`, `error_detail` and more."""
        base = f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances/{task_id}"
        if attempt is None:
            index = "" if map_index < 0 else f"/{map_index}"
            attempt = self.call("GET", f"{base}{index}")["try_number"]
        answer = self.call(
            "GET", f"{base}/logs/{attempt}", params={"map_index": map_index, "full_content": True}
        )
        events: list[Any] = answer["content"]
        return events

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any:
        """One XCom value."""
        base = f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances/{task_id}"
        return self.call("GET", f"{base}/xcomEntries/{key}", params={"map_index": map_index})["value"]

    def request(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """What a task that waits for a person (`awaiting_input`) asks; `body` is Markdown."""
        asked: dict[str, Any] = self.call("GET", _request_path(dag_id, run_id, task_id))
        return asked

    def respond(self, dag_id: str, run_id: str, task_id: str, option: str) -> None:
        """Answer a task that waits for a person (`awaiting_input`), after as long as a person needs at least.

        Airflow 3.3 fails a task that is resumed before its scheduler has read that the task paused
        (`process_executor_events`: "the task instance's state attribute is queued").
        """
        time.sleep(_READING_SECONDS)
        self.call("PATCH", _request_path(dag_id, run_id, task_id), json={"chosen_options": [option]})

    def state_mismatches(self, dag_id: str, run_id: str, task_id: str) -> dict[int, int]:
        """How often the scheduler failed a task only because its executor had told of an earlier
        execution: by map index. It costs the task a try."""
        path = "/eventLogs"
        wanted = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "event": "state mismatch"}
        found = self.call("GET", path, params={**wanted, "limit": 1000})["event_logs"]
        return dict(Counter(-1 if log["map_index"] is None else log["map_index"] for log in found))

    def _poll(self, done: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._check()
            if done():
                return True
            time.sleep(1.0)
        return False


def _request_path(dag_id: str, run_id: str, task_id: str) -> str:
    return f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances/{task_id}/-1/hitlDetails"


def task_name(task: Mapping[str, Any]) -> str:
    """`reconcile`, or `infer[3]` for a mapped task's instance."""
    index = "" if task["map_index"] < 0 else f"[{task['map_index']}]"
    return f"{task['task_id']}{index}"


class AirflowStack:
    """Airflow's processes, started and stopped by pid. Use as a context manager."""

    def __init__(
        self,
        home: Path,
        dags: Path,
        *,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        triggerer: bool = False,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            home: AIRFLOW_HOME: database, logs, secrets. A second start on it goes on from there.
            dags: folder with the DAG files.
            env: more environment variables, which win over `SETTINGS`.
            python: an interpreter that has Airflow.
            triggerer: start one as well, for deferrable operators.
        """
        self._components = (*_COMPONENTS, "triggerer") if triggerer else _COMPONENTS
        self.home = home.resolve()
        self.python = python
        self.port = free_port()
        self.env = {**os.environ, **SETTINGS, **self._own_settings(dags.resolve()), **(env or {})}
        self.api = AirflowApi(f"http://127.0.0.1:{self.port}", self.check)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._orphaned: list[subprocess.Popen[bytes]] = []
        """Ended leaders of groups that may have members still."""
        self._logs: list[TextIO] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 240.0) -> None:
        """Create the database if need be, start them all and wait until each reports in.

        Raises:
            StackError: one of them ended, or is not ready in time; with the end of its log.
        """
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        self.airflow("db", "migrate")
        try:
            for component in self._components:
                self._processes[component] = self._spawn(component)
            self.wait_until_ready(timeout)
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self, timeout: float = 240.0) -> None:
        """Wait until each reports in. Raises `StackError` if one ended, or is not ready in time."""
        deadline = time.monotonic() + timeout
        while not self.api.healthy():
            self.check()
            if time.monotonic() > deadline:
                tails = "\n\n".join(f"{c}:\n{self.log_tail(c, 15)}" for c in self._components)
                raise StackError(f"Airflow is not ready after {timeout:.0f} s\n{tails}")
            time.sleep(1.0)
        self.api.login()

    def stop(self, grace: float = 15.0) -> None:
        """End what was started: SIGTERM, and SIGKILL after `grace` seconds, to each one's own group."""
        for process in self._processes.values():
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + grace
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        self._processes.clear()
        for process in self._orphaned:
            _signal_group(process, signal.SIGKILL)
        self._orphaned.clear()
        for log in self._logs:
            log.close()
        self._logs.clear()

    def crash(self, *components: str, alone: bool = False) -> None:
        """Kill components hard, and start them again.

        Args:
            components: their names.
            alone: what they have started lives on until `stop`; else it is killed with them.
        """
        for component in components:
            process = self._processes[component]
            if alone:
                process.kill()
                self._orphaned.append(process)
            else:
                _signal_group(process, signal.SIGKILL)
            process.wait()
        for component in components:
            self._processes[component] = self._spawn(component)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, each of them leads a group of its own."""
        return [process.pid for process in self._processes.values()]

    def check(self) -> None:
        """Raise `StackError` if one of the processes has ended."""
        for component, process in self._processes.items():
            if process.poll() is not None:
                raise StackError(f"{component} ended with {process.returncode}:\n{self.log_tail(component)}")

    def airflow(self, *arguments: str) -> str:
        """Run one `airflow` command to its end on this home; its output. Raises `StackError`."""
        done = subprocess.run(
            [self.python, "-m", "airflow", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StackError(
                f"airflow {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return done.stdout

    def log_tail(self, component: str, lines: int = 40) -> str:
        """The last lines of a component's log."""
        path = self._log_path(component)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def _own_settings(self, dags: Path) -> dict[str, str]:
        return {
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home}/airflow.db",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{self.port}/execution/",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{self.port}",
            "AIRFLOW__API__SECRET_KEY": self._secret("api_secret"),
            "AIRFLOW__API_AUTH__JWT_SECRET": self._secret("jwt_secret"),
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "PYTHONUNBUFFERED": "1",
        }

    def _secret(self, name: str) -> str:
        """A secret of this home, made at the first start: all processes must share it."""
        path = self.home / name
        if not path.exists():
            self.home.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
        return path.read_text()

    def _spawn(self, component: str) -> subprocess.Popen[bytes]:
        log = self._log_path(component).open("a")
        self._logs.append(log)
        return subprocess.Popen(
            [self.python, "-m", "airflow", component],
            env=self.env,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _log_path(self, component: str) -> Path:
        return self.home / "logs" / f"{component}.log"


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


_FRAME_FIELDS = frozenset({"timestamp", "event", "level", "logger", "filename", "lineno", "error_detail"})
"""Fields of a log event that say where it comes from, not what happened."""


def _event_line(event: Any) -> str:
    """A structured log event as one line: its message, what else it says, and its exceptions."""
    if not isinstance(event, Mapping):
        return str(event)
    errors = [f"{e.get('exc_type')}: {e.get('exc_value')}" for e in event.get("error_detail") or []]
    more = [f"{key}={value}" for key, value in event.items() if key not in _FRAME_FIELDS]
    return " ".join([str(event.get("event", "")), *more, *errors])
