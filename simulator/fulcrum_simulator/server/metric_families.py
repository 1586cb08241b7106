"""Prometheus metric families, rendered without a client library.

Line prefixes are built once, and a scrape formats numbers only. Eight engine servers share two cores, and
each is scraped every second: rendering through objects per sample costs several milliseconds per scrape,
which delays steps; this costs a fraction of one. The layout is that of prometheus_client (sorted labels,
`_created` as a separate gauge family), because vLLM uses it. `metrics` fills the families.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from fulcrum_core.histogram import Histogram


class MetricFamily(Protocol):
    """A metric family that can render itself."""

    def render(self) -> str:
        """Return the HELP, TYPE and sample lines, each with its newline."""
        ...


def format_number(value: float) -> str:
    """Format a float like prometheus_client: `0.1`, `20.0`, `1.795e+09`, `+Inf`."""
    if value == float("inf"):
        return "+Inf"
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


def format_labels(labels: Mapping[str, str]) -> str:
    """Format labels as `{a="1",b="2"}`, sorted by name, values escaped; empty without labels."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(labels[name])}"' for name in sorted(labels)) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _format_header(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _format_created_lines(name: str, help_text: str, series: Iterable[str], created_s: float) -> str:
    stamp = format_number(created_s)
    return _format_header(f"{name}_created", "gauge", help_text) + "".join(
        f"{name}_created{labels} {stamp}\n" for labels in series
    )


class GaugeFamily:
    """Gauges, one for each value of `label_values`, or a single one with the key ""."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        *,
        label: str = "",
        label_values: Sequence[str] = ("",),
    ) -> None:
        self._header = _format_header(name, "gauge", help_text)
        self._prefixes = {
            label_value: name + format_labels({**labels, label: label_value} if label else labels) + " "
            for label_value in label_values
        }
        self._values = dict.fromkeys(label_values, 0.0)

    def set(self, value: float, label_value: str = "") -> None:
        """Set the value of one series."""
        self._values[label_value] = value

    def render(self) -> str:
        """Return HELP, TYPE and one line per series."""
        values = self._values
        return self._header + "".join(f"{p}{format_number(values[v])}\n" for v, p in self._prefixes.items())


class CounterFamily:
    """Counters, one for each value of `label_values`; `name` comes without `_total`."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        *,
        created_s: float,
        label: str = "",
        label_values: Sequence[str] = ("",),
    ) -> None:
        series = {
            label_value: format_labels({**labels, label: label_value} if label else labels)
            for label_value in label_values
        }
        self._header = _format_header(f"{name}_total", "counter", help_text)
        self._prefixes = {
            label_value: f"{name}_total{labels_text} " for label_value, labels_text in series.items()
        }
        self._values = dict.fromkeys(label_values, 0.0)
        self._created = _format_created_lines(name, help_text, series.values(), created_s)

    def set(self, value: float, label_value: str = "") -> None:
        """Set the count of one series; the caller never lowers it, which is not checked."""
        self._values[label_value] = value

    def render(self) -> str:
        """Return HELP, TYPE, one line per series, then the `_created` family."""
        values = self._values
        lines = "".join(f"{p}{format_number(values[v])}\n" for v, p in self._prefixes.items())
        return self._header + lines + self._created


class HistogramFamily:
    """Observations in cumulative buckets. The text is cached until the next observation: most histograms are
    idle.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        *,
        buckets: Sequence[float],
        created_s: float,
    ) -> None:
        self._histogram = Histogram([float(edge) for edge in buckets])
        self._header = _format_header(name, "histogram", help_text)
        self._prefixes = [
            f"{name}_bucket{format_labels({**labels, 'le': format_number(edge)})} "
            for edge in (*self._histogram.bounds, float("inf"))
        ]
        labels_text = format_labels(labels)
        self._count_prefix, self._sum_prefix = f"{name}_count{labels_text} ", f"{name}_sum{labels_text} "
        self._created = _format_created_lines(name, help_text, [labels_text], created_s)
        self._text = ""

    def observe(self, value: float) -> None:
        """Count one value."""
        self._histogram.observe(value)
        self._text = ""

    def quantile(self, share: float) -> float:
        """Return the upper edge of the `share`-quantile's bucket; 0 without observations, inf past the last
        edge.
        """
        target, cumulative = share * sum(self._histogram.counts), 0
        if target == 0:
            return 0.0
        for edge, count in zip((*self._histogram.bounds, float("inf")), self._histogram.counts, strict=True):
            cumulative += count
            if cumulative >= target:
                return edge
        return float("inf")

    def render(self) -> str:
        """Return HELP, TYPE, buckets, count and sum, then the `_created` family."""
        if not self._text:
            self._text = self._header + self._format_bucket_lines() + self._created
        return self._text

    def _format_bucket_lines(self) -> str:
        cumulative, lines = 0, []
        for prefix, count in zip(self._prefixes, self._histogram.counts, strict=True):
            cumulative += count
            lines.append(f"{prefix}{cumulative}.0\n")
        lines.append(
            f"{self._count_prefix}{cumulative}.0\n{self._sum_prefix}{format_number(self._histogram.sum)}\n"
        )
        return "".join(lines)


class InfoFamily:
    """An info family: one gauge sample that is always 1."""

    def __init__(self, name: str, help_text: str, labels: Mapping[str, str]) -> None:
        self._text = f"{_format_header(name, 'gauge', help_text)}{name}{format_labels(labels)} 1.0\n"

    def render(self) -> str:
        """Return HELP, TYPE and the sample line."""
        return self._text
