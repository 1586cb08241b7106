"""Runs `promtool`, or leaves a test out where the Debian package prometheus is not installed."""

import os
import shutil
import subprocess

import pytest


def require_program(name: str) -> str:
    """Return the path of `promtool` or `prometheus`."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed; make test-kubernetes installs the package prometheus as root"
        if os.environ.get("KUBERNETES_TESTS") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def run_promtool(*arguments: str, stdin: str = "") -> tuple[int, str]:
    """Run `promtool`; return its exit code and what it wrote."""
    done = subprocess.run(
        [require_program("promtool"), *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr
