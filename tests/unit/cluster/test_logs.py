"""Log lines are JSON and never hold values of local variables.

With `exception_texts=False` they do not hold the texts of exceptions either.
"""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from fulcrum_cluster.logs import configure_logging, log_loop_errors
from tests.waiting import run_pending_tasks

SECRET = "the-prompt-of-a-client"


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def fail(prompt: str) -> None:
    copied = prompt.upper()
    raise ValueError(f"cannot use {prompt} ({len(copied)})")


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("texts", [True, False], ids=["with exception texts", "without exception texts"])
def test_an_exception_is_one_line_without_the_values_of_local_variables(texts: bool) -> None:
    stream = io.StringIO()
    configure_logging(stream, exception_texts=texts)
    try:
        fail(SECRET)
    except ValueError:
        structlog.get_logger().exception("it failed", instance="d-1")
    [line] = read(stream)
    exception = line["exception"]
    assert (line["event"], line["level"], line["instance"]) == ("it failed", "error", "d-1")
    assert exception["type"] == "ValueError"
    assert exception["places"][-1].endswith(" fail")
    assert exception.get("text") == (f"cannot use {SECRET} (22)" if texts else None)
    assert SECRET.upper() not in stream.getvalue()
    assert (SECRET in stream.getvalue()) == texts


def test_messages_of_libraries_are_the_same_lines() -> None:
    stream = io.StringIO()
    configure_logging(stream)
    logging.getLogger("asyncio").warning("slow %s", "callback")
    logging.getLogger("asyncio").info("not logged")
    [line] = read(stream)
    assert (line["event"], line["level"], line["logger"]) == ("slow callback", "warning", "asyncio")


def test_the_message_with_which_a_library_reports_an_exception_is_left_out_without_texts() -> None:
    stream = io.StringIO()
    configure_logging(stream, exception_texts=False)
    try:
        fail(SECRET)
    except ValueError:
        logging.getLogger("some").exception("failed for %s", SECRET)
    [line] = read(stream)
    assert (line["event"], line["exception"]["type"]) == ("a library reported an error", "ValueError")
    assert SECRET not in stream.getvalue()


async def test_what_a_callback_of_the_loop_raises_is_logged_without_its_arguments() -> None:
    stream = io.StringIO()
    configure_logging(stream, exception_texts=False)
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)
    loop.call_soon(fail, SECRET)
    await run_pending_tasks()
    [line] = read(stream)
    assert (line["event"], line["exception"]["type"]) == ("unexpected error in the event loop", "ValueError")
    assert SECRET not in stream.getvalue()


def test_a_value_that_is_not_json_is_its_text() -> None:
    stream = io.StringIO()
    configure_logging(stream)
    structlog.get_logger().warning("odd", path=io)
    [line] = read(stream)
    assert line["path"].startswith("<module 'io'")
