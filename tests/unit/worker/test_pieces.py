"""The worker's pieces alone: order, search, judge, processes, announcements."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.conformance.patterns import MATCH_SECONDS, found, matches
from airflow_batchinfer.errors import SpecError, StoreError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.prompts.builder import Prepared, Prompt
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import PlannedShard
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.worker import guard, reporter, retrying, suspension
from airflow_batchinfer.worker.admission import Admission
from airflow_batchinfer.worker.checkpoint import encode_part
from airflow_batchinfer.worker.control import Control
from airflow_batchinfer.worker.engines.base import Completion, Request
from airflow_batchinfer.worker.ordering import order
from airflow_batchinfer.worker.outputs import output_judge
from airflow_batchinfer.worker.poison import Search
from airflow_batchinfer.worker.processes import identity, is_gone, process_age
from airflow_batchinfer.worker.reporter import Reporter
from airflow_batchinfer.worker.suspects import Announcer, Suspects, earlier_deaths
from airflow_batchinfer.worker.work import Row, ShardRun, result_of
from tests.plans import job, plan_run

PLANNED = PlannedShard(
    shard=0, rows=1, sent=1, predicted_tokens=1, rows_key="k", rows_bytes=1, rows_sha256="0"
)


def row(number: int, *prompts: Prompt) -> Row:
    return Row(ShardRun(PLANNED, "e"), number, 1, Prepared(prompts or (Prompt(text="x"),)))


# Order


def test_rows_that_share_a_prefix_go_together_and_the_longest_of_them_first() -> None:
    everywhere = list(range(50))
    group_a, group_b = [1000] * 40, [2000] * 40
    prompts = [
        everywhere + group_a + [1],
        everywhere + group_b + [1] * 9,
        everywhere + list(range(3000, 3060)),
        everywhere + group_a + [2] * 5,
        everywhere + group_b + [2],
        everywhere + list(range(4000, 4090)),
        everywhere + group_a + [3] * 3,
    ]
    rows = [row(i, Prompt(token_ids=ids)) for i, ids in enumerate(prompts)]
    assert [r.row_id for r in order(rows)] == [3, 6, 0, 1, 4, 5, 2]


def test_groups_within_a_group_stay_together() -> None:
    outer, inner = [1] * 40, [2] * 40
    prompts = [outer + inner + [i] for i in (5, 6)] + [outer + [3] * 40 + [i] for i in (5, 6)]
    prompts += [[9] * 60 + [1], [9] * 60 + [2]]
    shuffled = [prompts[i] for i in (0, 2, 4, 1, 3, 5)]
    ordered = [
        r.prepared.prompts[0].token_ids
        for r in order([row(i, Prompt(token_ids=p)) for i, p in enumerate(shuffled)])
    ]
    assert ordered == prompts


def test_text_is_put_in_order_as_well_and_order_loses_no_row() -> None:
    rng = random.Random(7)
    prefixes = ["".join(rng.choices("abc ", k=200)) for _ in range(4)]
    rows = [
        row(
            i, Prompt(messages=[{"role": "user", "content": rng.choice(prefixes) + "x" * rng.randint(0, 50)}])
        )
        for i in range(200)
    ]
    ordered = order(rows)
    assert sorted(r.row_id for r in ordered) == list(range(200))
    heads = [(r.prepared.prompts[0].messages or [])[0]["content"][:200] for r in ordered]
    assert sum(a != b for a, b in itertools.pairwise(heads)) == 3
    assert order([]) == []


# Search


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("seed", range(5))
def test_a_search_finds_the_culprit_within_its_bound(count: int, seed: int) -> None:
    rows = [row(i) for i in range(count)]
    culprit = random.Random(seed).choice(rows)
    deaths, freed = 1, []
    for suspect in rows:
        suspect.deaths = 1
    search, found = Search(rows), None
    while found is None:
        group = search.group
        assert group, "the search ended without the culprit"
        if culprit not in group:
            for innocent in group:
                innocent.finished = True
            search.survived()
            continue
        deaths += 1
        for suspect in group:
            suspect.deaths += 1
        found, more = search.died(group)
        freed += more
    assert found is culprit
    assert not search.group
    assert deaths <= math.ceil(math.log2(count)) + 3
    assert all(r.finished or r in freed or r is culprit for r in rows)


def test_a_death_that_does_not_repeat_convicts_nobody() -> None:
    rows = [row(i) for i in range(10)]
    search = Search(rows)
    seen: list[Row] = []
    while search.group:
        seen.extend(search.group)
        for innocent in search.group:
            innocent.finished = True
        search.survived()
    assert sorted(r.row_id for r in seen) == list(range(10))


@pytest.mark.parametrize("deaths", [1, 2, 5])
def test_one_death_alone_is_no_proof_however_many_came_before(deaths: int) -> None:
    alone = row(1)
    alone.deaths = deaths
    search = Search()
    assert search.died([alone]) == (None, [])
    assert search.group == [alone]
    assert search.died([alone]) == (alone, [])


# Admission


def test_a_row_enters_only_once_it_is_named_on_disk() -> None:
    admission = Admission()
    rows = [row(1), row(2)]
    admission.add(rows)
    assert admission.take(10, announced=5) == []
    rows[0].announced, rows[1].announced = 5, 6
    assert [piece.key for piece in admission.take(10, announced=5)] == ["1/0/1"]
    assert [piece.key for piece in admission.take(10, announced=6)] == ["2/0/1"]


def test_the_window_is_never_exceeded_and_retries_go_first() -> None:
    admission = Admission()
    rows = [row(i) for i in range(5)]
    for waiting in rows:
        waiting.announced = 1
    admission.add(rows)
    first = admission.take(2, announced=1)
    assert len(first) == 2
    admission.in_flight.pop(first[0].key)
    admission.retry(first[0], 0.0)
    again = admission.take(2, announced=1)
    assert [piece.key for piece in again] == ["0/0/2", "2/0/1"]


def submitted(count: int) -> tuple[Admission, list[str]]:
    """An admission with so many requests in flight, and their keys in order."""
    admission = Admission()
    rows = [row(i) for i in range(count)]
    for waiting in rows:
        waiting.announced = 1
    admission.add(rows)
    return admission, [piece.key for piece in admission.take(count, announced=1)]


def test_a_request_runs_once_it_is_the_oldest() -> None:
    admission, keys = submitted(3)
    assert admission.overdue(10.0, now=100.0) is None
    assert admission.overdue(10.0, now=110.5) is admission.in_flight[keys[0]]
    admission.answered(keys[0], now=111.0)
    assert admission.overdue(10.0, now=111.0) is None, "until now, the next one may have waited in the queue"
    assert admission.overdue(10.0, now=121.5) is admission.in_flight[keys[1]]


def test_a_request_runs_once_a_later_one_has_come_back() -> None:
    admission, keys = submitted(4)
    admission.answered(keys[2], now=100.0)
    admission.answered(keys[3], now=105.0)
    for key in keys[:2]:  # both hang: the second one's clock does not wait for the first one's end
        late = admission.overdue(10.0, now=110.5)
        assert late is admission.in_flight[key]
        del admission.in_flight[key]
    assert admission.overdue(10.0, now=110.5) is None


def test_another_attempt_begins_with_a_clock_of_its_own() -> None:
    admission, keys = submitted(2)
    again = admission.answered(keys[0], now=100.0)
    assert again is not None
    admission.retry(again, 0.0)
    admission.take(1, announced=1)
    admission.answered(keys[1], now=200.0)
    assert admission.overdue(10.0, now=200.0) is None
    assert admission.overdue(10.0, now=210.5) is again


def test_a_row_that_waits_is_queued_once_when_the_engine_dies_beside_it() -> None:
    """Of a group that runs apart, one request waits for its next attempt, one for its turn, one dies."""
    admission = Admission()
    group = [row(i) for i in range(3)]
    for suspect in group:
        suspect.begin()
    admission.set_apart(group)
    for suspect in group:
        suspect.announced = 1
    flying = admission.take(2, announced=1)
    failed = admission.answered(flying[0].key, now=1.0)
    assert failed is not None
    admission.retry(failed, 0.0)
    assert admission.died() == [group[1]]
    admission.release([group[0], group[2]])
    for suspect in group:
        suspect.announced = 2
    assert [piece.key for piece in admission.take(9, announced=2)] == ["0/0/2", "2/0/1"]


def test_a_row_of_several_requests_can_be_dropped_whole() -> None:
    admission = Admission()
    split = row(1, Prompt(text="a"), Prompt(text="b"), Prompt(text="c"))
    other = row(2)
    split.announced = other.announced = 1
    admission.add([split, other])
    flying = admission.take(2, announced=1)
    assert [piece.index for piece in flying] == [0, 1]
    assert sorted(admission.drop(split)) == ["1/0/1", "1/1/1"]
    assert [piece.row for piece in admission.take(9, announced=1)] == [other]


# Judge


def judged(task: dict[str, Any], text: str | None, finish: str = "stop") -> tuple[str | None, Reason | None]:
    judge = output_judge(job(Path("s"), task=task))
    result = judge(Completion("k", text=text, finish_reason=finish))
    return result.output, result.reason


SCHEMA = {"type": "json", "schema": {"type": "object", "required": ["a"]}}
LABELS = {"type": "choice", "labels": ["yes", "no"]}
PATTERN = {"type": "regex", "pattern": r"\d{3}"}
CENTS = {"type": "json", "schema": {"properties": {"a": {"multipleOf": 0.01}}}}
TREE = {"type": "json", "schema": {"properties": {"a": {"$ref": "#"}}}}
SLOW_PATTERN = r"(\w|\w\w)+!"
"""Where something else stands before the `!`, each letter more makes a match take half as long again."""
WORDS = "word" * 15 + ".!"
SLOW = {"type": "regex", "pattern": SLOW_PATTERN}
SLOW_VALUE = {"type": "json", "schema": {"properties": {"a": {"pattern": f"^{SLOW_PATTERN}$"}}}}
SLOW_KEY = {"type": "json", "schema": {"patternProperties": {f"^{SLOW_PATTERN}$": {"type": "integer"}}}}
SLOW_REST = {
    "type": "json",
    "schema": {"additionalProperties": False, "patternProperties": {f"^{SLOW_PATTERN}$": {}}},
}
SLOW_TREE = {
    "type": "json",
    "schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"a": {"$ref": "#"}, "b": {"pattern": f"^{SLOW_PATTERN}$"}},
    },
}
SLOW_LEAF = json.dumps({"a": {"b": WORDS}})
KEYS = {
    "type": "json",
    "schema": {
        "properties": {"a": {}},
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
    },
}
DEEP = '{"a":' * 400 + "{}" + "}" * 400


@pytest.mark.parametrize(
    ("task", "text", "finish", "output", "reason"),
    [
        ({"type": "generate"}, "hello", "length", "hello", None),
        ({"type": "generate"}, " \n", "stop", " \n", Reason.EMPTY_OUTPUT),
        ({"type": "generate"}, None, "stop", None, Reason.EMPTY_OUTPUT),
        (LABELS, "yes", "stop", "yes", None),
        (LABELS, " yes\n", "stop", "yes", None),
        (LABELS, "Yes", "stop", "Yes", Reason.INVALID_OUTPUT),
        (LABELS, "ye", "length", "ye", Reason.TRUNCATED_OUTPUT),
        (SCHEMA, '{"a": 1}', "stop", '{"a": 1}', None),
        (SCHEMA, '{"a": 1}', "length", '{"a": 1}', None),
        (SCHEMA, '{"b": 1}', "stop", '{"b": 1}', Reason.INVALID_OUTPUT),
        (SCHEMA, '{"a": ', "length", '{"a": ', Reason.TRUNCATED_OUTPUT),
        (SCHEMA, '{"a": NaN}', "stop", '{"a": NaN}', Reason.INVALID_OUTPUT),
        (SCHEMA, "[" * 100_000, "stop", "[" * 100_000, Reason.INVALID_OUTPUT),
        (CENTS, '{"a": 0.25}', "stop", '{"a": 0.25}', None),
        (CENTS, '{"a": 1e999}', "stop", '{"a": 1e999}', Reason.INVALID_OUTPUT),
        (TREE, DEEP, "stop", DEEP, Reason.INVALID_OUTPUT),
        (PATTERN, "123", "stop", "123", None),
        (PATTERN, "1234", "stop", "1234", Reason.INVALID_OUTPUT),
        (SLOW, WORDS, "length", WORDS, Reason.TRUNCATED_OUTPUT),
        (SLOW, WORDS, "stop", WORDS, Reason.INVALID_OUTPUT),
        (SLOW, "word" * 15 + "!", "stop", "word" * 15 + "!", None),
        (SLOW_VALUE, json.dumps({"a": WORDS}), "stop", json.dumps({"a": WORDS}), Reason.INVALID_OUTPUT),
        (SLOW_KEY, json.dumps({WORDS: 1}), "stop", json.dumps({WORDS: 1}), Reason.INVALID_OUTPUT),
        (SLOW_REST, json.dumps({WORDS: 1}), "stop", json.dumps({WORDS: 1}), Reason.INVALID_OUTPUT),
        (SLOW_TREE, SLOW_LEAF, "stop", SLOW_LEAF, Reason.INVALID_OUTPUT),
        (KEYS, '{"a": "1", "x1": 1}', "stop", '{"a": "1", "x1": 1}', None),
        (KEYS, '{"x1": "1"}', "stop", '{"x1": "1"}', Reason.INVALID_OUTPUT),
        (KEYS, '{"y1": 1}', "stop", '{"y1": 1}', Reason.INVALID_OUTPUT),
    ],
)
def test_judge(task: dict[str, Any], text: str, finish: str, output: str, reason: Reason | None) -> None:
    assert judged(task, text, finish) == (output, reason)


def test_threads_at_work_beside_it_make_no_match_slow() -> None:
    letters, took = 10, 0.0
    while took < MATCH_SECONDS / 6:  # a letter more takes half as long again
        letters, began = letters + 1, time.thread_time()
        assert not matches(SLOW_PATTERN, "x" * letters + ".!")
        took = time.thread_time() - began
    text = "x" * letters + ".!"
    done, block = threading.Event(), bytes(10_000_000)

    def work() -> None:
        while not done.is_set():
            hashlib.sha256(block)  # without Python's lock

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    try:
        assert not matches(SLOW_PATTERN, text)
        assert not found(f"^{SLOW_PATTERN}$", text)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_schema_that_is_none_is_a_spec_error_and_a_reference_is_never_fetched() -> None:
    with pytest.raises(SpecError, match=r"task\.schema"):
        output_judge(job(Path("s"), task={"type": "json", "schema": {"type": "nonsense"}}))
    outside = {"type": "json", "schema": {"$ref": "http://127.0.0.1:9/schema.json"}}
    assert judged(outside, "{}")[1] is Reason.INVALID_OUTPUT


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"unevaluatedProperties": False, "patternProperties": {"^x": {}}}, "use `additionalProperties`"),
        (
            {"unevaluatedProperties": False, "allOf": [{"patternProperties": {"^x": {}}}]},
            "use `additionalProperties`",
        ),
        (
            {"$defs": {"a": {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "x"}}},
            "a `$schema` below the top",
        ),
    ],
)
def test_a_schema_whose_patterns_would_have_no_limit_is_a_spec_error(
    schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=r"task\.schema: ") as caught:
        output_judge(job(Path("s"), task={"type": "json", "schema": schema}))
    assert said in str(caught.value)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    properties = {"$schema": {"type": "string"}, "unevaluatedProperties": {"type": "integer"}}
    task = {"type": "json", "schema": {"properties": properties, "unevaluatedProperties": False}}
    assert judged(task, '{"$schema": "x", "unevaluatedProperties": 1}')[1] is None


@pytest.mark.parametrize("dialect", ["http://json-schema.org/draft-07/schema#", None])
@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"pattern": "a{e"}}}, {"patternProperties": {"a{e": {}}}]
)
def test_a_pattern_that_cannot_be_matched_here_is_a_spec_error(
    schema: dict[str, Any], dialect: str | None
) -> None:
    schema = schema if dialect is None else {"$schema": dialect, **schema}
    with pytest.raises(SpecError, match=r"task\.schema: .*'a\{e' is not a 'regex'"):
        output_judge(job(Path("s"), task={"type": "json", "schema": schema}))


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        ([0.1, 0.2], None),
        ([], Reason.EMPTY_OUTPUT),
        (None, Reason.EMPTY_OUTPUT),
        ([math.nan], Reason.INVALID_OUTPUT),
        ([math.inf], Reason.INVALID_OUTPUT),
    ],
)
def test_judge_of_vectors(vector: list[float] | None, reason: Reason | None) -> None:
    judge = output_judge(job(Path("s"), task={"type": "embed"}))
    assert judge(Completion("k", vector=vector, finish_reason="stop")).reason is reason


# Parts


def test_a_part_holds_any_text() -> None:
    texts = ["plain", "nul \0", "half a pair \ud800", "漢字", "", None]
    results = [result_of(row(i), None, 1, output=text) for i, text in enumerate(texts)]
    table = pq.read_table(pa.BufferReader(encode_part(results, {"batchinfer.epoch": "e"})))
    assert table["output"].to_pylist() == ["plain", "nul \0", "half a pair ?", "漢字", "", None]
    assert table.schema.metadata[b"batchinfer.epoch"] == b"e"


def test_a_write_is_tried_again_and_the_last_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_WAIT_SECONDS", (0.0, 0.0))
    tries: list[int] = []

    def write(fails: int) -> None:
        tries.append(1)
        if len(tries) <= fails:
            raise StoreError(f"no {len(tries)}")

    retrying.with_retries(lambda: write(2))
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(StoreError, match="no 3"):
        retrying.with_retries(lambda: write(9))


# Looks at the store


class Watched(Reporter):
    """A reporter without its threads, on a clock that goes on by `after`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (reporter, suspension):
            monkeypatch.setattr(module, "boot_seconds", lambda: self.now)
        plan = plan_run(job(folder / "store", checkpoint={"progress_seconds": 2}), [["a"]])
        store = LocalStore(folder / "store")
        self.stop = Path(store.uri_of(RunLayout(plan.folder).stop))
        super().__init__(store, plan, [], Control(), lambda: None)

    def after(self, seconds: float, *, ticks: bool = True) -> bool:
        """Whether rows may be sent after so long, in which the process was suspended if nothing ticks."""
        for _ in range(int(seconds / 0.25) if ticks else 0):
            self.now += 0.25
            self._suspensions.tick()
        self.now += 0.0 if ticks else seconds
        return self.up_to_date()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_rows_are_sent_only_while_the_store_was_looked_at_lately(watched: Watched) -> None:
    assert watched.after(60), "asked but once meanwhile: judging may take its time"
    assert not watched.after(1), "longer than others wait for a sign of life"
    watched.look()
    assert watched.after(60)
    watched.look()

    watched.stop.mkdir()  # what cannot be read
    for _ in range(10):
        watched.look()
    assert watched.after(58), "looked at lately all the same"
    with pytest.raises(StoreError, match="nothing is known of other attempts"):
        watched.after(5)


def test_after_a_suspension_no_row_is_sent_before_a_look_that_began_later(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.look()
    assert not watched.after(2, ticks=False), "awake, and nothing has ticked yet"
    assert not watched.after(1)
    watched.look()
    assert watched.after(1)

    def suspended(*_: object) -> None:
        watched.after(30, ticks=False)
        watched.after(1)

    with monkeypatch.context() as patch:
        patch.setattr(reporter, "read_stop", suspended)
        watched.look()
    assert not watched.after(1), "that look began before"
    watched.look()
    assert watched.after(1)


def test_a_look_counts_from_its_end_and_fails_for_any_error(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> None:
        watched.after(90)

    def broken(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(reporter, "read_stop", slow)
    watched.look()
    assert watched.after(59)
    monkeypatch.setattr(reporter, "read_stop", broken)
    for _ in range(10):
        watched.look()
    with pytest.raises(StoreError, match="nothing is known of other attempts"):
        watched.after(5)


# Stalls


def test_an_engine_that_nobody_listens_to_does_not_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = guard.GuardedEngine(job(tmp_path, retry={"stall_seconds": 300}))
    engine.start()
    engine.submit([Request("0/0/1", 0, text="x")])

    def stalls_after(seconds: float) -> bool:
        now[0] += seconds
        engine.inspect()
        return engine.stalled

    with engine.unheard():
        assert not stalls_after(1000)
    assert not stalls_after(299)
    assert stalls_after(2)
    engine.bury()


@pytest.mark.parametrize(
    ("retry", "limit"),
    [
        ({"stall_seconds": 300, "row_timeout_seconds": 3600}, 3660),
        ({"stall_seconds": 300, "row_timeout_seconds": 60}, 300),
    ],
)
def test_an_engine_that_gives_up_rows_itself_may_be_as_silent_as_a_row_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry: dict[str, float], limit: float
) -> None:
    now = [1000.0]
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    model = {"name": "none", "backend": "tests.engines:InstantEngine", "engine": {"keeps_row_timeout": True}}
    engine = guard.GuardedEngine(job(tmp_path, model=model, retry=retry))
    engine.start()
    engine.submit([Request("0/0/1", 0, text="x")])
    now[0] += limit - 1
    engine.inspect()
    assert not engine.stalled
    now[0] += 2
    engine.inspect()
    assert engine.stalled
    engine.bury()


# Processes and suspects


def test_an_identity_tells_the_living_from_the_gone() -> None:
    mine = identity()
    place, ticks = mine.rsplit(":", 2)[0], mine.rsplit(":", 1)[1]
    assert is_gone(mine) is False
    assert is_gone(f"{place}:4194304:{ticks}") is True  # no such process: beyond the largest id
    assert is_gone(mine + "1") is True  # its id has been given to another process since
    assert is_gone("another-host:1:2:3") is None
    assert is_gone("nonsense") is None
    assert 0 < process_age() < 36_000


def test_deaths_are_counted_and_only_the_dead_convict(tmp_path: Path) -> None:
    store, layout = LocalStore(tmp_path), RunLayout("job/runs/r")
    gone = identity().rsplit(":", 2)[0] + ":4194304:1"

    def leave(epoch: str, worker: str, rows: list[int], *, apart: bool = False) -> None:
        made = Suspects(shard=0, epoch=epoch, worker=worker, apart=apart, rows=rows)
        made.write(store, layout.suspects(0, epoch))

    def found(poisoned: tuple[int, ...] = ()) -> Any:
        return earlier_deaths(store, layout, 0, "mine", poisoned, 5.0)

    leave("a", gone, [1, 2, 3])
    leave("mine", gone, [9])
    assert dict(found().deaths) == {1: 1, 2: 1, 3: 1}
    leave("b", identity(), [3], apart=True)
    assert found().deaths[3] == 2
    assert found().culprits == {}, "its worker lives: it may yet survive"
    leave("b", gone, [3], apart=True)
    assert found().culprits == {}, "the node may have vanished just then"
    leave("c", gone, [3], apart=True)
    assert list(found().culprits) == [3]
    assert "the worker died 3 times" in found().culprits[3]
    assert "2 of them with no other row beside it (attempts b, c)" in found().culprits[3]
    assert not found(poisoned=(3,)).deaths, "explained deaths make no suspects"
    store.write_bytes(layout.suspects(0, "d"), b"{half")
    assert list(found().culprits) == [3]


def test_what_cannot_be_read_of_earlier_attempts_convicts_nobody(tmp_path: Path) -> None:
    class OfAnotherRelease(Suspects):
        new: int = 1

    store, layout = LocalStore(tmp_path), RunLayout("job/runs/r")
    other = OfAnotherRelease(shard=0, epoch="a", worker="another-host:1:2:3", apart=True, rows=[1])
    other.write(store, layout.suspects(0, "a"))
    for epoch in ("b", "c"):
        made = Suspects(shard=0, epoch=epoch, worker="another-host:1:2:3", apart=True, rows=[3])
        made.write(store, layout.suspects(0, epoch))
        store.write_bytes(layout.progress(0, epoch), b"{")

    found = earlier_deaths(store, layout, 0, "mine", (), 5.0)
    assert (dict(found.deaths), found.culprits) == ({3: 2}, {})
    for epoch in ("b", "c"):
        os.utime(tmp_path / layout.progress(0, epoch), (0, 0))
    assert list(earlier_deaths(store, layout, 0, "mine", (), 5.0).culprits) == [3]


def test_an_attempt_that_has_yet_to_write_its_progress_is_not_dead(tmp_path: Path) -> None:
    store, layout = LocalStore(tmp_path), RunLayout("job/runs/r")
    for epoch in ("a", "b"):
        made = Suspects(shard=0, epoch=epoch, worker="another-host:1:2:3", apart=True, rows=[3])
        made.write(store, layout.suspects(0, epoch))
    assert earlier_deaths(store, layout, 0, "mine", (), 5.0).culprits == {}
    for epoch in ("a", "b"):
        os.utime(tmp_path / layout.suspects(0, epoch), (0, 0))
    assert list(earlier_deaths(store, layout, 0, "mine", (), 5.0).culprits) == [3]


def test_an_announcer_that_fails_in_any_way_says_so(tmp_path: Path) -> None:
    announcer = Announcer(LocalStore(tmp_path), {}.__getitem__, "me")
    announcer.announce({7: [1]}, apart=False)
    announcer.close(forget=False)
    assert "cannot announce rows: KeyError: 7" in str(announcer.error)


class ReadOnly(LocalStore):
    """A store that has stopped taking writes."""

    broken = False

    def write_bytes(self, key: str, data: bytes) -> None:
        if self.broken:
            raise StoreError("cannot write: read-only")
        super().write_bytes(key, data)

    def delete(self, key: str) -> None:
        if self.broken:
            raise StoreError("cannot delete: read-only")
        super().delete(key)


def test_after_a_store_failure_suspects_are_forgotten_as_far_as_the_store_lets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retrying, "_WAIT_SECONDS", ())
    layout = RunLayout("job/runs/r")
    for recovers in (True, False):
        store = ReadOnly(tmp_path)
        announcer = Announcer(store, lambda shard: ("e", layout.suspects(shard, "e")), "me")
        announcer.announce({0: [1]}, apart=False)
        while not announcer.idle:
            time.sleep(0.001)
        store.broken = True
        announcer.announce({0: [2]}, apart=False)
        while announcer.error is None:
            time.sleep(0.001)
        store.broken = not recovers
        announcer.close(forget=True)
        assert store.exists(layout.suspects(0, "e")) is not recovers
    assert "cannot delete: read-only" in caplog.text


def test_a_clean_exit_leaves_no_suspects(tmp_path: Path) -> None:
    store, layout = LocalStore(tmp_path), RunLayout("job/runs/r")
    announcer = Announcer(store, lambda shard: ("e", layout.suspects(shard, "e")), "me")
    number = announcer.announce({0: [1, 2], 1: [3]}, apart=False)
    last = announcer.announce({1: [3]}, apart=True)
    deadline = threading.Event()
    while not announcer.idle:
        assert not deadline.wait(0.001)
    assert (number, last, announcer.durable) == (1, 2, 2)
    assert not store.exists(layout.suspects(0, "e"))
    assert Suspects.read(store, layout.suspects(1, "e")).rows == [3]
    announcer.close(forget=True)
    assert list(store.list("job")) == []
