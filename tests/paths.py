"""Folders that tests read from, wherever the test itself lies: repository, golden files, fixtures, traces."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "golden"
MODELS = ROOT / "tests" / "fixtures" / "models"
"""A folder for each model, with its config.json."""
