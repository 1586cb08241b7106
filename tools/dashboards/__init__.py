"""Grafana dashboards as code, one module each; `python -m tools.dashboards FOLDER` writes the JSON files.

`make generate` writes them into the chart. `panels` draws, `queries` holds the PromQL; a dashboard's module
chooses.
"""
