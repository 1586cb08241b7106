"""Fixture that renders the chart with Helm, in one process for the whole run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import pytest
import yaml

from tests.paths import ROOT

CHART = ROOT / "helm" / "fulcrum"


class ChartRefusedError(Exception):
    """Helm rejects these values."""


@dataclass(frozen=True, slots=True)
class RenderedChart:
    """The chart, rendered with one set of values."""

    files: dict[str, str]
    """Text by file name below templates/."""
    objects: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    """Messages of `helm lint`."""

    def find(self, kind: str, name: str) -> dict[str, Any]:
        """Return the only object of this kind and name."""
        (found,) = (
            made for made in self.objects if made["kind"] == kind and made["metadata"]["name"] == name
        )
        return found

    def list_kinds(self) -> set[str]:
        """Return the kinds of all objects."""
        return {made["kind"] for made in self.objects}


class Renderer:
    """Client of the renderer process: called with values, returns the rendered chart.

    The tests share one rendering of the same values, and change nothing of it.
    """

    def __init__(self, requests: IO[str], responses: IO[str]) -> None:
        self._requests, self._responses = requests, responses
        self._rendered: dict[str, RenderedChart] = {}

    def __call__(self, **options: Any) -> RenderedChart:
        key = json.dumps(options)
        if key not in self._rendered:
            self._rendered[key] = self.render_again(**options)
        return self._rendered[key]

    def render_again(
        self, *, release: str = "fulcrum", namespace: str = "fulcrum-system", **values: Any
    ) -> RenderedChart:
        """Render the chart, even if it was rendered with these values before."""
        values["image"] = {"repository": "registry.example/fulcrum", **values.get("image", {})}
        request = {"values": values, "namespace": namespace, "release": release}
        print(json.dumps(request), file=self._requests, flush=True)
        response = json.loads(self._responses.readline())
        if "error" in response:
            raise ChartRefusedError(response["error"])
        files = {name.partition("/templates/")[2]: text for name, text in response["files"].items()}
        objects = [made for name, text in files.items() if name.endswith(".yaml") for made in _parse(text)]
        return RenderedChart(files, objects, response["findings"])


@cache
def _parse(text: str) -> list[dict[str, Any]]:
    """Parse the objects of one file; most files, above all the CRDs, are the same for most values."""
    return [made for made in yaml.safe_load_all(text) if made]


@pytest.fixture(scope="session")
def render() -> Iterator[Renderer]:
    """`render(**values)` renders the chart with an image; release and namespace are keywords, too."""
    command = [sys.executable, "-m", "tests.helm.renderer_program", str(CHART)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin
        assert process.stdout
        yield Renderer(process.stdin, process.stdout)
        process.stdin.close()
