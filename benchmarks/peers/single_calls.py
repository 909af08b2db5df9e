"""Peer: a loop of single calls, each answer written as it comes."""

from __future__ import annotations

import sys

from benchmarks.peers.job import Job
from benchmarks.peers.llm_chat import chat, results

__all__ = ["main", "results"]


def main(job: Job) -> None:
    """One prompt at a time."""
    chat(job, chunk=1)


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
