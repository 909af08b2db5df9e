"""Peer: `LLM.chat` in chunks of `max_num_seqs`, a write after each: the usual home-made checkpoint.

A second start leaves out what the file has.
"""

from __future__ import annotations

import sys

from benchmarks.peers.job import Job
from benchmarks.peers.llm_chat import chat, results

__all__ = ["main", "results"]


def main(job: Job) -> None:
    """A user's loop; without `max_num_seqs` among the arguments, chunks of 64."""
    chat(job, chunk=int(job.engine.get("max_num_seqs", 64)))


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
