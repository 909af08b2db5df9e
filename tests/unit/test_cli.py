from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.progress import Progress
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import LocalStore, ObjectInfo
from tests.plans import job, plan_run

TICKETS = Path(__file__).parents[2] / "dags" / "tickets.yaml"
Answer = tuple[int, str, str]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*arguments: str) -> Answer:
        status = main(arguments)
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def planned(tmp_path: Path) -> tuple[str, str]:
    """A store with one planned run of two shards: the store, and the run's folder."""
    plan = plan_run(job(tmp_path / "store"), [["one"], ["two", "three"]])
    return plan.spec.store, plan.folder


@pytest.mark.parametrize("arguments", [(), ("schema",)])
def test_the_schema_is_the_specs_own(cli: Callable[..., Answer], arguments: tuple[str, ...]) -> None:
    status, out, _ = cli(*arguments)
    assert status == 0
    assert json.loads(out) == JobSpec.model_json_schema()


def test_the_sample_is_valid_and_says_what_it_reads(cli: Callable[..., Answer], tmp_path: Path) -> None:
    status, out, _ = cli("validate", str(TICKETS), "--store", str(tmp_path))
    assert status == 0
    assert "subject, text" in out
    assert str(tmp_path) in out


def test_the_full_spec_is_a_spec(cli: Callable[..., Answer], tmp_path: Path) -> None:
    _, out, _ = cli("validate", str(TICKETS), "--store", str(tmp_path), "--full")
    again = tmp_path / "again.yaml"
    again.write_text(out, encoding="utf-8")
    assert cli("validate", str(again), "--full") == (0, out, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "cannot be read as YAML"),
        ("name: a\nstroe: x\n", "did you mean `store`?"),
        (
            "name: a\nstore: x\ninput: {path: a.csv}\nmodel: {name: m}\nprompt: {template: '{{ a'}\n",
            "template",
        ),
    ],
)
def test_a_wrong_spec_is_refused_with_the_files_name(
    cli: Callable[..., Answer], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    status, out, err = cli("validate", str(file))
    assert (status, out) == (ExitCode.BAD_SPEC, "")
    assert err.startswith(f"batchinfer: {file}: ")
    assert message in err


def test_runs_and_show(cli: Callable[..., Answer], planned: tuple[str, str]) -> None:
    store, folder = planned
    status, out, _ = cli("runs", folder.split("/")[0], "--store", store)
    assert status == 0
    assert folder in out
    assert "0/3 rows" in out
    status, out, _ = cli("show", folder, "--store", store)
    assert status == 0
    assert "0 of 2 committed" in out
    assert "shard 0001 waiting: 0/2 rows" in out


def _progress(store: str, folder: str, epoch: str, updated_at: str) -> None:
    layout = RunLayout(folder)
    Progress(
        shard=1,
        epoch=epoch,
        state="running",
        updated_at=updated_at,
        sent=2,
        done=1,
        durable=1,
        counts={"succeeded": 1},
        tokens=Tokens(prompt=900_000, output=100_000, cached=500_000),
        rows_per_second=0.5,
        tokens_per_second=700.0,
        held_seconds=1800.0,
    ).write(LocalStore(store), layout.progress(1, epoch))


def test_show_tells_pace_and_price(cli: Callable[..., Answer], tmp_path: Path) -> None:
    prices = {"currency": "EUR", "per_hour": 2.0, "per_million_output_tokens": 10.0}
    plan = plan_run(job(tmp_path / "store", cost=prices), [["one"], ["two", "three"]])
    store, folder = plan.spec.store, plan.folder
    now = datetime.now(UTC)
    _progress(store, folder, "20260101T000000000Z-00000000", (now - timedelta(hours=9)).isoformat())
    out = cli("show", folder, "--store", store)[1]
    assert "rate" not in out, "that worker is dead"
    _progress(store, folder, "20260101T000000001Z-00000000", (now + timedelta(hours=9)).isoformat())
    out = cli("show", folder, "--store", store)[1]
    assert "rate         0.5 rows/s, 700 tokens/s: about 4.0 s left" in out
    assert "tokens       2,000,000 (1,800,000 prompt, 200,000 output)" in out
    assert "held         1 h 00 min, all workers together" in out
    assert "cost         4.00 EUR" in out


def test_runs_shows_the_last_and_reads_no_shard_of_what_is_settled(
    cli: Callable[..., Answer], planned: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, first = planned
    store = LocalStore(uri)
    plan = Plan.read(store, RunLayout(first).plan)
    for name in ("second", "third"):
        folder = run_dir(plan.job, name)
        plan.model_copy(update={"folder": folder, "run_id": name}).write(store, RunLayout(folder).plan)
        store.write_bytes(RunLayout(folder).merge, b"{}")
    for age, folder in enumerate((first, run_dir(plan.job, "second"), run_dir(plan.job, "third"))):
        os.utime(Path(uri) / RunLayout(folder).plan, (age, age))
    out = cli("runs", plan.job, "--store", uri)[1]
    assert "inferring               0/3 rows" in out
    assert out.count("published               3/3 rows") == 2

    listed: list[str] = []
    real = LocalStore.list

    def counted(self: LocalStore, prefix: str) -> Iterator[ObjectInfo]:
        listed.append(prefix)
        return real(self, prefix)

    monkeypatch.setattr(LocalStore, "list", counted)
    out = cli("runs", plan.job, "--store", uri, "--last", "2")[1]
    assert first not in out
    assert out.count("published") == 2
    assert listed == []


def test_last_is_a_number_from_1(cli: Callable[..., Answer], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("runs", "job", "--last", "0")
    assert "0 is not a number from 1" in capsys.readouterr().err


def test_stop_and_resume(cli: Callable[..., Answer], planned: tuple[str, str]) -> None:
    store, folder = planned
    marker = Path(store) / RunLayout(folder).stop
    status, out, _ = cli("stop", folder, "--store", store, "--reason", "too dear", "--by", "eva")
    assert status == 0
    assert "stopped by eva: too dear" in out
    assert marker.exists()
    assert "too dear" in cli("show", folder, "--store", store)[1]
    assert "is removed" in cli("resume", folder, "--store", store)[1]
    assert not marker.exists()
    assert "no stop marker" in cli("resume", folder, "--store", store)[1]


@pytest.mark.parametrize("command", [("show",), ("resume",), ("stop", "--reason", "x")])
def test_a_folder_without_a_plan_is_no_run(
    cli: Callable[..., Answer], tmp_path: Path, command: tuple[str, ...]
) -> None:
    status, _, err = cli(*command, run_dir("job", "nothing"), "--store", str(tmp_path))
    assert status == ExitCode.BAD_INPUT
    assert "is no run" in err


def test_no_report_without_a_plan(cli: Callable[..., Answer], tmp_path: Path) -> None:
    status, _, err = cli("report", run_dir("job", "nothing"), "--store", str(tmp_path))
    assert (status, "has no plan" in err) == (ExitCode.BAD_INPUT, True)


def test_a_user_without_a_name(
    cli: Callable[..., Answer], planned: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container it is often so, and no command needs one but `stop`."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    store, folder = planned
    status, out, _ = cli("stop", folder, "--store", store, "--reason", "too dear")
    assert (status, f"stopped by user {os.getuid()}" in out) == (0, True)


def test_the_store_comes_from_the_environment_or_is_asked_for(
    cli: Callable[..., Answer], planned: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = planned
    monkeypatch.delenv("BATCHINFER_STORE", raising=False)
    status, _, err = cli("show", folder)
    assert status == ExitCode.BAD_SPEC
    assert "BATCHINFER_STORE" in err
    monkeypatch.setenv("BATCHINFER_STORE", store)
    assert cli("show", folder)[0] == 0


def test_a_command_that_needs_airflows_side_says_so(tmp_path: Path) -> None:
    call = f"main(['sweep', 'tickets', '--store', {str(tmp_path)!r}])"
    code = (
        f"import sys; sys.modules['deltalake'] = None; from airflow_batchinfer.cli import main; exit({call})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BAD_SPEC
    assert done.stderr.startswith("batchinfer: `sweep` needs the package `deltalake`")
    assert "airflow-provider-batchinfer[airflow]" in done.stderr
