"""Replay dead letters: name the run and what to change, press Trigger.

Exactly the rows of the run that are dead letters run again; what succeeds goes into that run's results,
and its letters become `resolved`. A second replay finds nothing left to do.
"""

from __future__ import annotations

from airflow_batchinfer.dag import replay_dead_letters

dag = replay_dead_letters(job="tickets", max_parallel_shards=2, doc_md=__doc__, tags=["batchinfer"])
