"""Log of router, operator and autoscaler: one JSON object a line.

An exception is logged with its type and the places that it passed through. Values of local variables are
never logged, and the router leaves out the text of exceptions as well: both may hold a client's prompt.
asyncio, kopf and other libraries log through the standard library; their messages become the same lines. The
programs call `configure_logging` once, at their start.
"""

import argparse
import asyncio
import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LOG_LEVEL = "info"
MAX_PLACES = 20
"""Places of one exception that are logged: the last ones, where it was raised."""


def configure_logging(
    stream: TextIO | None = None, *, level: str = DEFAULT_LOG_LEVEL, exception_texts: bool = True
) -> None:
    """Log as JSON lines, messages of the standard library included.

    Args:
        stream: File for the lines; None: standard error.
        level: Lowest of `LOG_LEVELS` that is logged.
        exception_texts: Whether the text of an exception is logged, and the text of a library's message that
            reports one.
    """
    stream = sys.stderr if stream is None else stream

    def describe(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        error = _take_exception(event)
        if error is not None:
            event["exception"] = describe_exception(error, with_text=exception_texts)
        return event

    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(stream),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            describe,
            structlog.processors.JSONRenderer(default=str),
        ],
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_LibraryHandler(exception_texts)], force=True)


def add_log_level_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --log-level."""
    text = "lowest level that is logged (%(default)s)"
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=DEFAULT_LOG_LEVEL, help=text)


def describe_exception(error: BaseException, *, with_text: bool) -> dict[str, Any]:
    """Describe an exception for the log: its type, where it was raised and passed on, and its cause."""
    places = traceback.extract_tb(error.__traceback__, limit=-MAX_PLACES)
    described: dict[str, Any] = {
        "type": type(error).__qualname__,
        "places": [f"{place.filename}:{place.lineno} {place.name}" for place in places],
    }
    if with_text:
        described["text"] = str(error)
    if error.__cause__ is not None:
        described["cause"] = type(error.__cause__).__qualname__
    return described


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log what no code catches in this event loop, without asyncio's details: arguments of calls."""
    log = structlog.get_logger()

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        log.error("unexpected error in the event loop", exc_info=context.get("exception"))

    loop.set_exception_handler(handle)


def _take_exception(event: MutableMapping[str, Any]) -> BaseException | None:
    """Remove `exc_info` from an event and return its exception; None if there is none."""
    given = event.pop("exc_info", None)
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple) and isinstance(given[1], BaseException):
        return given[1]
    return sys.exc_info()[1] if given else None


class _LibraryHandler(logging.Handler):
    """Passes messages of the standard library's loggers on."""

    def __init__(self, exception_texts: bool) -> None:
        super().__init__()
        self._exception_texts = exception_texts
        self._log = structlog.get_logger()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not self._exception_texts:
            message = "a library reported an error"
        else:
            message = record.getMessage()
        self._log.log(record.levelno, message, logger=record.name, exc_info=record.exc_info)
