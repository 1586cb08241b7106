"""All open pages get each state; a page that reads slowly skips states and delays nobody."""

import asyncio

import pytest

from fulcrum_cli.web.broadcast import PAGES_MAX, QUEUE_MAX, Broadcast, TooManyPages
from tests.waiting import run_pending_tasks


async def test_every_page_gets_each_state() -> None:
    broadcast = Broadcast()
    with broadcast.open_page() as first, broadcast.open_page() as second:
        broadcast.send(b"1")
        assert (await first.get(), await second.get()) == (b"1", b"1")


async def test_a_new_page_gets_the_last_state_at_once() -> None:
    broadcast = Broadcast()
    broadcast.send(b"1")
    with broadcast.open_page() as page:
        assert await page.get() == b"1"


async def test_a_slow_page_skips_the_oldest_states() -> None:
    broadcast = Broadcast()
    with broadcast.open_page() as slow:
        for number in range(1000):
            broadcast.send(str(number).encode())
        assert [await slow.get() for _ in range(QUEUE_MAX)] == [b"998", b"999"]


async def test_a_page_waits_for_the_next_state() -> None:
    broadcast = Broadcast()
    with broadcast.open_page() as page:
        waiting = asyncio.create_task(page.get())
        await run_pending_tasks()
        assert not waiting.done()
        broadcast.send(b"1")
        assert await waiting == b"1"


async def test_pages_are_bounded_and_a_closed_page_makes_room() -> None:
    broadcast = Broadcast()
    pages = [broadcast.open_page() for _ in range(PAGES_MAX)]
    for page in pages:
        page.__enter__()
    with pytest.raises(TooManyPages, match="50 pages are open already"), broadcast.open_page():
        pass
    pages[0].__exit__(None, None, None)
    with broadcast.open_page():
        assert broadcast.open_pages == PAGES_MAX


async def test_nothing_is_to_be_polled_while_no_page_is_open() -> None:
    broadcast = Broadcast()
    opened = asyncio.create_task(broadcast.wait_opened())
    await run_pending_tasks()
    assert not opened.done()
    with broadcast.open_page():
        await opened
    again = asyncio.create_task(broadcast.wait_opened())
    await run_pending_tasks()
    assert not again.done()
    again.cancel()
