"""Text on the live page is readable in both themes: contrast of 4.5 to 1 or more, as WCAG 2 AA asks."""

import re

import pytest

from tests.paths import ROOT

CSS = (ROOT / "web/src/page.css").read_text(encoding="utf-8")
PAIRS = [
    ("text", "ground"), ("text", "surface"), ("text", "raised"), ("dim", "surface"), ("dim", "raised"),
    ("dim", "ground"), ("good", "surface"), ("bad", "surface"), ("bad", "raised"), ("text", "prefill-soft"),
    ("dim", "prefill-soft"), ("prefill-ink", "prefill-soft"), ("text", "decode-soft"), ("dim", "decode-soft"),
    ("decode-ink", "decode-soft"),
]  # fmt: skip
THEMES = ["light", "dark"]
"""Themes in the order of the two colours of `light-dark()`."""


def read_colours(theme: str) -> dict[str, str]:
    found = re.findall(r"--([\w-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\);", CSS)
    assert found
    return {name: colours[THEMES.index(theme)] for name, *colours in found}


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable(theme: str) -> None:
    colours = read_colours(theme)
    low = {
        f"{text} on {ground}": round(ratio, 2)
        for text, ground in PAIRS
        if (ratio := contrast(colours[text], colours[ground])) < 4.5
    }
    assert low == {}
