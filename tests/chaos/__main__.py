"""`make chaos`: run the matrix, print the table, and write `docs/chaos.md`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.chaos.matrix import Line, cases, run_case

_HEAD = """# The chaos matrix

The output of `make chaos`. Each line injects one fault at a fixed point of a real process, lets the run
finish, and asks an oracle that reads only the store. *Lost*: input rows in neither table. *Doubled*: rows
in the tables twice. *Paid twice*: answers paid for rows that a part already held. *Failed*: tries that did
not come to their end, or ended other than promised.

| fault | where | tries | rows lost | rows doubled | rows paid twice | failed |
|---|---|--:|--:|--:|--:|--:|
"""


def main() -> int:
    """Run all; exit 1 if any cell is not zero."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--random-kills", type=int, default=200)
    parser.add_argument("--document", type=Path, default=Path("docs/chaos.md"))
    parser.add_argument("--only", default="", help="cases whose fault contains this text")
    arguments = parser.parse_args()
    lines = []
    for case in cases(random_kills=arguments.random_kills):
        if arguments.only not in case.fault:
            continue
        began = time.monotonic()
        line = run_case(case)
        lines.append(line)
        print(f"{_row(line)}  {time.monotonic() - began:.0f} s", flush=True)
        for reason in line.failed:
            print(f"    {reason}", flush=True)
    if not arguments.only:
        arguments.document.write_text(_HEAD + "".join(f"{_row(line)}\n" for line in lines))
    bad = sum(not line.clean for line in lines)
    print(f"{len(lines) - bad} passed, {bad} failed")
    return 1 if bad else 0


def _row(line: Line) -> str:
    case = line.case
    cells = [case.fault, case.where or "–", len(case.tries), line.lost, line.doubled, line.paid_twice]
    return f"| {' | '.join(map(str, [*cells, len(line.failed)]))} |"


if __name__ == "__main__":
    sys.exit(main())
