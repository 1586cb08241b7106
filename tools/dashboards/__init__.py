"""Grafana dashboards as code: `python -m tools.dashboards FOLDER` writes one JSON file for each."""
