"""Prometheus text without a client library: prefixes are built once, a scrape formats numbers only.

Eight engine servers share two cores and each is scraped every second. Rendering through per-sample objects
costs several milliseconds a scrape, which shows up as late steps; this costs a fraction of one. The layout
is prometheus_client's (sorted labels, `_created` as a gauge family of its own), because that is what vLLM
answers with.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Family(Protocol):
    """A metric family that can write its lines."""

    def render(self) -> str:
        """HELP, TYPE and sample lines, each ending in a newline."""
        ...


def number(value: float) -> str:
    """A float as prometheus_client writes it: `0.1`, `20.0`, `1.795e+09`, `+Inf`."""
    if value == float("inf"):
        return "+Inf"
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


def label_set(labels: Mapping[str, str]) -> str:
    """`{a="1",b="2"}`, sorted by name, values escaped; empty for no labels."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _header(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _created_lines(name: str, help_text: str, series: Iterable[str], created_s: float) -> str:
    stamp = number(created_s)
    return _header(f"{name}_created", "gauge", help_text) + "".join(
        f"{name}_created{labels} {stamp}\n" for labels in series
    )


class Gauge:
    """Values that go up and down, one for each value of `variants` (or a single one, keyed by "")."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        *,
        by: str = "",
        variants: Sequence[str] = ("",),
    ) -> None:
        self._header = _header(name, "gauge", help_text)
        self._prefixes = {
            variant: name + label_set({**labels, by: variant} if by else labels) + " " for variant in variants
        }
        self._values = dict.fromkeys(variants, 0.0)

    def set(self, value: float, variant: str = "") -> None:
        """Replace the value of one series."""
        self._values[variant] = value

    def render(self) -> str:
        """HELP, TYPE and one line per series."""
        values = self._values
        return self._header + "".join(f"{p}{number(values[v])}\n" for v, p in self._prefixes.items())


class Counter:
    """Values that only grow, one for each value of `variants`; `name` is given without `_total`."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        *,
        created_s: float,
        by: str = "",
        variants: Sequence[str] = ("",),
    ) -> None:
        series = {variant: label_set({**labels, by: variant} if by else labels) for variant in variants}
        self._header = _header(f"{name}_total", "counter", help_text)
        self._prefixes = {variant: f"{name}_total{labels_text} " for variant, labels_text in series.items()}
        self._values = dict.fromkeys(variants, 0.0)
        self._created = _created_lines(name, help_text, series.values(), created_s)

    def set(self, value: float, variant: str = "") -> None:
        """What one series counts by now; never less than before."""
        self._values[variant] = value

    def render(self) -> str:
        """HELP, TYPE, one line per series, then the `_created` family."""
        values = self._values
        lines = "".join(f"{p}{number(values[v])}\n" for v, p in self._prefixes.items())
        return self._header + lines + self._created


class Histogram:
    """Observations in cumulative buckets. Text is kept until the next observation: most are idle."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        *,
        edges: Sequence[float],
        created_s: float,
    ) -> None:
        self._edges = tuple(float(edge) for edge in edges)
        self._header = _header(name, "histogram", help_text)
        self._prefixes = [
            f"{name}_bucket{label_set({**labels, 'le': number(edge)})} "
            for edge in (*self._edges, float("inf"))
        ]
        labels_text = label_set(labels)
        self._count_prefix, self._sum_prefix = f"{name}_count{labels_text} ", f"{name}_sum{labels_text} "
        self._created = _created_lines(name, help_text, [labels_text], created_s)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        self._text = ""

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value
        self._text = ""

    def quantile(self, share: float) -> float:
        """Upper edge of the `share`-quantile's bucket; 0 without observations, inf past the last edge."""
        wanted, seen = share * sum(self._counts), 0
        if wanted == 0:
            return 0.0
        for edge, count in zip((*self._edges, float("inf")), self._counts, strict=True):
            seen += count
            if seen >= wanted:
                return edge
        return float("inf")

    def render(self) -> str:
        """HELP, TYPE, buckets, count and sum, then the `_created` family."""
        if not self._text:
            self._text = self._header + self._bucket_lines() + self._created
        return self._text

    def _bucket_lines(self) -> str:
        seen, lines = 0, []
        for prefix, count in zip(self._prefixes, self._counts, strict=True):
            seen += count
            lines.append(f"{prefix}{seen}.0\n")
        lines.append(f"{self._count_prefix}{seen}.0\n{self._sum_prefix}{number(self._sum)}\n")
        return "".join(lines)


class Constant:
    """An info family: one gauge sample that is always 1."""

    def __init__(self, name: str, help_text: str, labels: Mapping[str, str]) -> None:
        self._text = f"{_header(name, 'gauge', help_text)}{name}{label_set(labels)} 1.0\n"

    def render(self) -> str:
        """HELP, TYPE and the one line."""
        return self._text
