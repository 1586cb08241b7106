"""The page of the chart's values, from its values and their schema. `__main__` writes it."""

import json
from pathlib import Path

import yaml

from tools.generate_chart import render_values_table

_CHART = Path(__file__).resolve().parents[2] / "helm" / "fulcrum"
_INTRODUCTION = """# Values of the chart

`helm show values helm/fulcrum` shows the defaults. `values.schema.json` rejects names that are not in
this table. How to install: [the chart](../how-to/install.md).

"""


def render_page() -> str:
    """Return the page: one table of all values."""
    values = yaml.safe_load((_CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((_CHART / "values.schema.json").read_text(encoding="utf-8"))
    return _INTRODUCTION + render_values_table(values, schema)
