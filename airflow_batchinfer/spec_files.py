"""Spec files: where relative paths in a spec lead, and which store it has if it names none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import JobSpec, ModelSpec
from airflow_batchinfer.yaml_text import read_fields


def load_spec(path: str | Path, default_store: str | None = None) -> JobSpec:
    """Read a spec file; its relative paths are taken from the file's folder.

    A relative `store` is taken from `default_store`, if there is one. A spec without `store` gets
    `default_store` itself.

    Raises:
        SpecError: the file cannot be read or is not a valid spec; begins with the file's path.
    """
    file = Path(path).resolve()
    try:
        return build_spec(read_fields(file), file.parent, default_store)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def build_spec(data: Mapping[str, Any], folder: Path, default_store: str | None = None) -> JobSpec:
    """Validate fields as a spec, its relative paths taken from `folder` (see `load_spec`).

    Raises:
        SpecError: as `JobSpec.parse`.
    """
    if default_store and not data.get("store"):
        data = {**data, "store": default_store}
    spec = JobSpec.parse(data)
    store_base = _join(folder, default_store) if default_store else str(folder)
    return spec.model_copy(
        update={
            "store": _join(store_base, spec.store),
            "input": spec.input.model_copy(update={"path": _join_all(folder, spec.input.path)}),
            "model": _model(folder, spec.model),
            "judge": spec.judge
            and spec.judge.model_copy(
                update={"model": spec.judge.model and _model(folder, spec.judge.model)}
            ),
            "validation": spec.validation.model_copy(
                update={"suite": spec.validation.suite and _join(folder, spec.validation.suite)}
            ),
            "export": [e.model_copy(update={"path": _join(folder, e.path)}) for e in spec.export],
        }
    )


def _model(folder: Path, model: ModelSpec) -> ModelSpec:
    return model.model_copy(
        update={
            "name": _join_dotted(folder, model.name),
            "tokenizer": _join_dotted(folder, model.tokenizer),
            "adapter": _join_dotted(folder, model.adapter),
            "compile_cache": _join_dotted(folder, model.compile_cache),
        }
    )


def _join_all(folder: Path, paths: str | list[str]) -> str | list[str]:
    return _join(folder, paths) if isinstance(paths, str) else [_join(folder, p) for p in paths]


def _join_dotted(folder: Path, name: str | None) -> str | None:
    """Models: `./x` and `../x` are folders; `org/x` is a name on Hugging Face and stays."""
    return _join(folder, name) if name and name.startswith(("./", "../")) else name


def _join(base: str | Path, path: str) -> str:
    if "://" in path or Path(path).expanduser().is_absolute():
        return path
    if "://" in str(base):
        return f"{str(base).rstrip('/')}/{path.removeprefix('./')}"
    return str((Path(base) / path).resolve())
