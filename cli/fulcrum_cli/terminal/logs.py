"""Where this process's own log lines go: the operator's logic runs in it."""

import logging
import os
import sys
from pathlib import Path

import structlog


def log_warnings_to_stderr() -> None:
    """Warnings to standard error: where no view is disturbed by them."""
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )


def log_to_file(path: Path | None) -> None:
    """Everything to the end of a file; None: nowhere."""
    file = open(path or os.devnull, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(file),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
