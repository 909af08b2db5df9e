"""Side by side: the same prompts and model through this package and through its named peers.

`python -m benchmarks.peers` runs it (see `__main__`). One module a peer; each has `main(job)`, run in
the peer's own process and environment, and `results(folder)`, which reads what it left on disk.
"""
