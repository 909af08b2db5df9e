"""The limit of open requests follows the server."""

from __future__ import annotations

import asyncio
import time

import pytest

from airflow_batchinfer.worker.engines.concurrency import AdaptiveLimit


def test_it_doubles_in_a_round_until_trouble_then_grows_by_one() -> None:
    limit = AdaptiveLimit(first=4, most=64)
    for _ in range(4):
        limit.went_well()
    assert limit.size == 8
    limit.went_badly(time.monotonic())
    assert limit.size == 4
    for _ in range(5):
        limit.went_well()
    assert limit.size == 5


def test_it_is_halved_once_for_requests_that_were_open_together() -> None:
    limit = AdaptiveLimit(first=16, most=16)
    sent = time.monotonic()
    for _ in range(10):
        limit.went_badly(sent)
    assert limit.size == 8
    limit.went_badly(time.monotonic())
    assert limit.size == 4


def test_it_stays_between_one_and_the_most() -> None:
    limit = AdaptiveLimit(first=2, most=3)
    for _ in range(10):
        limit.went_well()
    assert limit.size == 3
    for _ in range(10):
        limit.went_badly(time.monotonic())
    assert limit.size == 1


@pytest.mark.parametrize("tasks", [1, 20])
def test_no_more_turns_are_taken_than_it_allows(tasks: int) -> None:
    async def run() -> int:
        limit = AdaptiveLimit(first=3, most=3)
        open_, most = 0, 0

        async def turn() -> None:
            nonlocal open_, most
            async with limit:
                open_ += 1
                most = max(most, open_)
                await asyncio.sleep(0.001)
                open_ -= 1

        await asyncio.gather(*(turn() for _ in range(tasks)))
        return most

    assert asyncio.run(run()) == min(tasks, 3)


def test_a_cancelled_wait_frees_its_turn() -> None:
    async def run() -> None:
        limit = AdaptiveLimit(first=1, most=1)
        limit.pause(0.2)

        async def turn() -> None:
            async with limit:
                pass

        waiting = asyncio.create_task(turn())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(turn(), 30)

    asyncio.run(run())
