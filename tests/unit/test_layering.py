"""DESIGN's arrows: operators → pipeline, worker → run, prompts → store, spec; and what each may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "airflow_batchinfer"
NAME = PACKAGE.name

BELOW = {
    "store": {"errors"},
    "spec": {"errors", "outcome", "store"},  # the options of a store are part of the spec
    "run": {"errors", "outcome", "spec", "store"},
    "prompts": {"errors", "outcome", "spec", "store", "run"},
    "conformance": {"errors", "spec"},
    "pipeline": {"errors", "outcome", "spec", "spec_overrides", "store", "run", "prompts", "conformance"},
    "worker": {"errors", "outcome", "spec", "store", "run", "prompts", "conformance"},
    "yaml_text": {"errors"},
    "spec_overrides": set(),
    "operators": {
        "errors",
        "outcome",
        "spec",
        "spec_files",
        "spec_overrides",
        "yaml_text",
        "store",
        "run",
        "prompts",
        "pipeline",
    },
}
"""What each layer may import of the package, itself apart."""

NO_AIRFLOW = (
    "outcome",
    "spec",
    "spec_overrides",
    "yaml_text",
    "errors",
    "store",
    "run",
    "prompts",
    "conformance",
    "pipeline",
    "worker",
    "cli",
)
HEAVY = {"airflow", "duckdb", "deltalake", "pandas", "great_expectations"}
"""What the worker's environment does not have."""


def _modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Dotted names of all imports, those for type checkers and inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _layers(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith(f"{NAME}.")}


def _roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(path)}


@pytest.mark.parametrize("layer", sorted(BELOW))
def test_arrows_point_one_way(layer: str) -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): sorted(bad)
        for path, own in _modules()
        if own == layer and (bad := _layers(path) - BELOW[layer] - {layer, "__version__"})
    }
    assert not wrong


def test_only_operators_know_airflow_and_only_the_worker_knows_vllm() -> None:
    for path, layer in _modules():
        roots = _roots(path)
        if layer in NO_AIRFLOW:
            assert "airflow" not in roots, path
        if layer != "worker":
            assert not roots & {"vllm", "torch"}, path
        if layer in NO_AIRFLOW and layer not in ("pipeline", "cli"):
            assert not roots & HEAVY, path


def test_the_worker_runs_without_what_only_airflow_has() -> None:
    script = f"""
import importlib, pkgutil, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(HEAVY)}:
            raise ImportError(f"the worker must not need {{name}}")
sys.meta_path.insert(0, Blocked())
import {NAME}.worker
for package in ("worker", "conformance", "prompts", "run", "store"):
    module = importlib.import_module(f"{NAME}.{{package}}")
    for info in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        if not info.name.endswith(("__main__", ".vllm_driver", ".vllm_options", ".vllm_parameters")):
            importlib.import_module(info.name)
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "imported", done.stderr
