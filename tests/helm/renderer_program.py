"""Renders the chart with Helm's library, one JSON line `{"values", "namespace", "release"}` at a time.

A process of its own, because the library starts Go's runtime, whose threads would stay in the tests' process.
"""

import json
import sys
from typing import Any

from helm_python import Chart, HelmError, lint
from helm_python.config import Config


def render_chart(chart: Chart, folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the rendered files and the messages of `helm lint`, or Helm's error."""
    values, namespace = request["values"], request["namespace"]
    empty_kubeconfig = "apiVersion: v1\nkind: Config\n"
    try:
        chart.validate_schema(values)
        with Config(kubeconfig_content=empty_kubeconfig, namespace=namespace) as config:
            files = config.render(
                chart, values, name=request["release"], namespace=namespace, is_install=True
            )
        findings = lint(folder, values, strict=True, namespace=namespace)["messages"]
    except HelmError as error:
        return {"error": str(error)}
    return {"files": files, "findings": findings}


def main(folder: str) -> None:
    """Render once for each line of standard input."""
    chart = Chart.load(folder)
    for line in sys.stdin:
        print(json.dumps(render_chart(chart, folder, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
