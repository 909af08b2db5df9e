"""Every example in README and docs works as printed: jobs are valid, DAGs load, the rest parses."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.spec import JobSpec

pytestmark = pytest.mark.airflow_env

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REST_OF_A_JOB: dict[str, Any] = {
    "name": "tickets",
    "input": {"path": "tickets.jsonl", "id_column": "ticket_id"},
    "prompt": {"template": "{{ text }}"},
    "model": {"name": "org/model"},
    "store": "s3://bucket/batch",
}
"""What an example that shows a part of a job leaves out."""


def examples(*languages: str) -> Iterator[Any]:
    """The fenced blocks in these languages, each named by its page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in re.finditer(r"^( *)```(\w+)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            if fence[2] in languages:
                line = text.count("\n", 0, fence.start()) + 1
                yield pytest.param(textwrap.dedent(fence[3]), id=f"{page.name}:{line}")


@pytest.mark.parametrize("text", examples("yaml"))
def test_jobs_are_valid(text: str) -> None:
    from airflow_batchinfer.pipeline.expectations import check_expectations
    from airflow_batchinfer.pipeline.judging import check_judge

    fields = yaml.safe_load(text)
    if "apiVersion" in fields:
        assert fields["kind"]
        return
    spec = JobSpec.parse(REST_OF_A_JOB | fields)
    PromptTemplate(spec.prompt)
    check_expectations(spec)
    check_judge(spec)


@pytest.mark.parametrize("code", examples("python"))
def test_dags_load(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no working directory to help, as in Airflow."""
    monkeypatch.chdir("/")
    fields = {**REST_OF_A_JOB, "pilot": {"rows": 100}}
    for name in ("tickets.yaml", "job.yaml", "my.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump(fields), encoding="utf-8")
    runnable = compile(code.replace("/opt/jobs", str(tmp_path)), "example", "exec")
    if "airflow" in code:
        exec(runnable, {"__file__": str(tmp_path / "dag.py")})


@pytest.mark.parametrize("text", examples("json"))
def test_json_is_json(text: str) -> None:
    json.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_names_a_language_that_is_tested_here(page: Path) -> None:
    opened = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
    assert set(opened) <= {"yaml", "python", "json", "sql", "sh", ""}


@pytest.mark.parametrize("path", sorted((ROOT / "dags").glob("*.py")), ids=lambda path: path.name)
def test_shipped_dags_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk import DAG

    monkeypatch.setenv("AIRFLOW__BATCHINFER__STORE", "s3://bucket/batch")
    module: dict[str, Any] = {"__file__": str(path), "__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), module)
    assert isinstance(module["dag"], DAG)
