"""Chooses where this process writes its log. A local run executes the operator's code in this process.

`up`, `play` and `web` call it; the other processes of a run have log files of their own.
"""

import logging
import os
import sys
from pathlib import Path

import structlog

from fulcrum_cluster.logs import configure_logging


def log_warnings_to_stderr() -> None:
    """Log warnings and errors to standard error; for commands without a live view."""
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ],
    )


def log_to_file(path: Path | None) -> None:
    """Append all messages from INFO up to a file, as JSON lines; None discards them."""
    file = open(path or os.devnull, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process
    configure_logging(file)
