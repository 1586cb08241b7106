"""Answers for programs: the same document as JSON or YAML."""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import yaml


class OutputFormat(StrEnum):
    """Forms of an answer."""

    JSON = "json"
    YAML = "yaml"


def render_document(document: Mapping[str, Any], output_format: OutputFormat) -> str:
    """The document in that form, without a line end at its end."""
    if output_format is OutputFormat.JSON:
        return json.dumps(document, indent=2, ensure_ascii=False)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110).rstrip("\n")
