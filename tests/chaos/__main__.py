"""`make chaos`: run the matrix, print the table, and write `docs/chaos.md`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.matrix import SEED, Line, cases, run_case

_HEAD = """# The chaos matrix

The output of `make chaos`. Each line injects one fault at a fixed point of a real process, lets the run
finish, and asks an oracle that reads the stored files with none of the package's code. {struck} faults
struck (seed {seed}). A try whose fault does not strike fails.

- *Lost*: input rows in neither table. *Doubled*: rows in the tables twice. *Wrong*: results that are not
  what the engine answers to that row's text.
- *Paid twice*: answers to rows that had stood in a readable part before the request was sent, where the
  payer began after that, or had made that part itself. A row that is on its way when a part with it lands
  is not counted.
- *Beside*: the same where the payer had begun before another attempt wrote that part. An attempt looks
  every few seconds, and first of all when it wakes up, whether another has committed; until then two that
  run at once may pay for the same rows.
- *Failed*: tries that did not come to their end, or ended other than promised. To end as promised is also:
  the dead letters are exactly those that the case is made for, with their reasons; the ledger counts what
  the parts hold; an interrupted merge leaves each table as it was or as it will be.

What it does not show, and what does:

- Any change of what decides an answer is noticed, and named:
  [test_run.py](../tests/unit/contract/test_run.py), [test_plan.py](../tests/unit/pipeline/test_plan.py).
- Memory does not grow with the number of rows: measured, in [benchmarks.md](benchmarks.md).
- Order and columns come back: [test_merge.py](../tests/unit/pipeline/test_merge.py),
  [test_conservation.py](../tests/unit/pipeline/test_conservation.py).
- Two replays of the same rows at once: [test_replay.py](../tests/unit/pipeline/test_replay.py).
- Two workers on two machines whose clocks differ, one of them silent: no test. Here the clocks differ, and
  the machine is one.
- A provider's batch that is paid once though its submitter dies, or that expires half done: no test, as no
  engine here uses a provider's batches.

| fault | where | tries | strikes | lost | doubled | wrong | paid twice | beside | failed |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def main() -> int:
    """Run all; exit 1 if a try failed, or any row was lost, doubled, wrong or paid twice."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--random-kills", type=int, default=200)
    parser.add_argument("--document", type=Path, default=Path("docs/chaos.md"))
    parser.add_argument("--only", default="", help="cases whose fault contains this text: their lines anew")
    arguments = parser.parse_args()
    lines = []
    rows = _rows_of(arguments.document) if arguments.only else {}
    for case in cases(random_kills=arguments.random_kills):
        if arguments.only not in case.fault:
            continue
        began = time.monotonic()
        line = run_case(case)
        lines.append(line)
        rows[case.fault, case.where] = _row(line)
        print(f"{_row(line)}  {time.monotonic() - began:.0f} s", flush=True)
        for reason in line.failed:
            print(f"    {reason}", flush=True)
    arguments.document.write_text(_head(rows.values()) + "".join(f"{row}\n" for row in rows.values()))
    bad = sum(not line.clean for line in lines)
    print(f"{len(lines) - bad} passed, {bad} failed")
    return 1 if bad else 0


def _rows_of(document: Path) -> dict[tuple[str, str], str]:
    """Lines of the table that stands in the document, by fault and where."""
    rows = [line for line in document.read_text().splitlines() if line.startswith("| ")]
    return {(cells[0], cells[1].replace("–", "")): row for row in rows[1:] if (cells := _cells(row))}


def _head(rows: Iterable[str]) -> str:
    return _HEAD.format(struck=sum(int(_cells(row)[3]) for row in rows), seed=SEED)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def _row(line: Line) -> str:
    case, found = line.case, (line.lost, line.doubled, line.wrong, line.paid_twice, line.paid_beside)
    cells = [case.fault, case.where or "–", len(case.tries), len(line.strikes), *found, len(line.failed)]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
