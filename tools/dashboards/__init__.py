"""Grafana dashboards as code, one module each; `python -m tools.dashboards FOLDER` writes the JSON files."""
