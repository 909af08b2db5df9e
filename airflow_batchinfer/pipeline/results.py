"""Results: the columns of the results table, and answered rows as such columns."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.answered import AnsweredBatch
from airflow_batchinfer.pipeline.outputs import OutputColumns
from airflow_batchinfer.pipeline.tables import dataset_of, delta_type, open_table
from airflow_batchinfer.run.layout import results_table
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.shard import TRACKED_FIELDS
from airflow_batchinfer.spec import RESERVED_OUTPUT_COLUMNS, JobSpec
from airflow_batchinfer.store import Store

PARTITION_BY = ("run_id", "merged_by")

_ANSWER_FIELDS = [
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("output_tokens", pa.int32()),
    pa.field("cached_tokens", pa.int32()),
    pa.field("attempts", pa.int16()),
    pa.field("finished_at", pa.timestamp("us", tz="UTC")),
]


@dataclass(frozen=True)
class PublishedRows:
    """A run as it stands in a job's results table."""

    run_id: str
    created_at: datetime
    generation: int
    fingerprint: str


class ResultColumns:
    """Makes rows of the results table of one run.

    Columns: `row_id`, `custom_id`; the run they belong to (`job`, `run_id`, `run_created_at`,
    `generation`, `run_fingerprint`); the carried columns; the output columns; how the answer came about
    (`finish_reason`, tokens, `attempts`, `finished_at`, `fingerprint`, `copy_of`, `answered_in`: the run
    that paid for it); `merged_by`, the run whose merge wrote the row (another than `run_id` for a
    replay's); and for incremental jobs `input_digest` and `change`.
    """

    def __init__(self, plan: Plan) -> None:
        """Rows answered in `plan`'s run, filed under the run that it repairs if it is a replay."""
        self.outputs = OutputColumns(plan.spec)
        self.carried = carried_schema(plan)
        self.prefix = plan.spec.output.carry_prefix
        home = plan.replay_of or plan
        self._same = {
            "job": pa.scalar(plan.job),
            "run_id": pa.scalar(home.run_id),
            "run_created_at": planned_at(home.created_at),
            "generation": pa.scalar(home.generation, pa.int32()),
            "run_fingerprint": pa.scalar(home.fingerprint),
            "merged_by": pa.scalar(plan.run_id),
        }
        self._answered = {
            "answered_in": pa.scalar(plan.run_id),
            "fingerprint": pa.scalar(plan.fingerprint),
        }
        self.exact_schema = pa.schema(
            [
                pa.field("row_id", pa.int64()),
                pa.field("custom_id", pa.string()),
                *(pa.field(name, value.type) for name, value in self._same.items()),
                *(pa.field(self.prefix + f.name, _without_view(f.type)) for f in self.carried),
                *self.outputs.fields,
                *_ANSWER_FIELDS,
                pa.field("copy_of", pa.int64()),
                *(pa.field(name, value.type) for name, value in self._answered.items()),
                *TRACKED_FIELDS,
            ]
        )
        """With the input's own types: what exports write."""
        self.schema = pa.schema([f.with_type(delta_type(f.type)) for f in self.exact_schema])
        """With types that Delta has."""

    @property
    def own_names(self) -> frozenset[str]:
        """Columns that `assemble` adds."""
        return frozenset(self._same)

    def rows(self, batch: AnsweredBatch, *, exact: bool) -> pa.RecordBatch | None:
        """Rows of `schema` or `exact_schema` for the batch's succeeded rows; none if there are none."""
        good = pc.equal(batch.answers.column("outcome"), Outcome.SUCCEEDED.value)
        count = pc.sum(good).as_py() or 0
        if not count:
            return None
        answers = batch.answers.filter(good)
        values = {"row_id": batch.row_ids.filter(good), "custom_id": batch.custom_ids.filter(good)}
        values |= {self.prefix + name: column.filter(good) for name, column in batch.carried.items()}
        typed = self.outputs.columns(answers.column(self.outputs.source))
        values |= {f.name: column for f, column in zip(self.outputs.fields, typed, strict=True)}
        values |= {f.name: answers.column(f.name) for f in _ANSWER_FIELDS}
        values |= {name: pa.repeat(value, count) for name, value in self._answered.items()}
        values |= {"copy_of": batch.copy_of.filter(good)}
        values |= {name: column.filter(good) for name, column in batch.tracked.items()}
        return self.assemble(values, count, exact=exact)

    def assemble(self, values: Mapping[str, pa.Array], rows: int, *, exact: bool) -> pa.RecordBatch:
        """A batch from columns by name; those of the run itself are added."""
        schema = self.exact_schema if exact else self.schema
        everything = {name: pa.repeat(value, rows) for name, value in self._same.items()} | dict(values)
        return pa.record_batch([to_type(everything[f.name], f.type) for f in schema], schema=schema)


def check_result_columns(spec: JobSpec) -> None:
    """Fail if two columns of the results table would have the same name; Delta ignores case.

    Raises:
        SpecError: names both, and the remedy.
    """
    own = [f.name for f in OutputColumns(spec).fields]
    seen = {name.lower(): name for name in [*RESERVED_OUTPUT_COLUMNS, *own]}
    for column in spec.carried:
        name = spec.output.carry_prefix + column
        if name.lower() in seen:
            raise SpecError(
                f"input.carry: the results table cannot have both `{name}` and `{seen[name.lower()]}`: set "
                "`output.carry_prefix` or `output.column`, or rename the column in the input"
            )
        seen[name.lower()] = name


def planned_at(created_at: str) -> pa.Scalar:
    """A plan's `created_at` as it stands in the results, in `run_created_at`."""
    return pa.scalar(datetime.fromisoformat(created_at), pa.timestamp("us", "UTC"))


def published_fields(spec: JobSpec, read: pa.Schema) -> list[pa.Field]:
    """The results table's carried and output columns for an input of this schema, with Delta's types.

    A carried column that the input lacks is left out.
    """
    carried = [f.with_name(spec.output.carry_prefix + f.name) for f in read if f.name in spec.carried]
    return [f.with_type(delta_type(f.type)) for f in [*carried, *OutputColumns(spec).fields]]


def runs_in(table: DeltaTable) -> dict[str, datetime]:
    """When each run in a results table was planned, oldest first; read from the table's log alone."""
    files = pa.table(table.get_add_actions(flatten=True))
    names = ["partition.run_id", "max.run_created_at"]
    if not set(names) <= set(files.column_names):
        return {}
    planned: dict[str, datetime] = {}
    for run_id, created in zip(*(files[name].to_pylist() for name in names), strict=True):
        planned[run_id] = max(created, planned.get(run_id, created))
    return dict(sorted(planned.items(), key=lambda run: run[1]))


def newest_published(store: Store, job: str, *, other_than: str | None = None) -> PublishedRows | None:
    """The newest run in a job's results table, by when it was planned, but `other_than`; or none.

    Raises:
        StoreError: the table cannot be read.
    """
    key = results_table(job)
    table = open_table(store, key)
    if table is None:
        return None
    runs = [run_id for run_id in runs_in(table) if run_id != other_than]
    if not runs:
        return None
    run_id = runs[-1]
    columns = ["run_created_at", "generation", "run_fingerprint"]
    rows = dataset_of(store, key, table).head(1, columns=columns, filter=ds.field("run_id") == run_id)
    row = rows.to_pylist()[0]
    return PublishedRows(run_id, row["run_created_at"], row["generation"], row["run_fingerprint"])


def carried_schema(plan: Plan) -> pa.Schema:
    """The carried columns with the types that the input has them in."""
    if plan.input.carry_schema is None:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(plan.input.carry_schema)))


def to_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast; timestamps may lose what Delta does not have."""
    if values.type == kind:
        return values
    return values.cast(kind, safe=not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)))


def _without_view(kind: pa.DataType) -> pa.DataType:
    """Views of text and bytes as plain ones: Arrow cannot sort them yet."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind
