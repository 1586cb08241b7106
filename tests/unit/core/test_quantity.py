"""Quantities and byte sizes in Kubernetes notation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fulcrum_core.api.quantity import (
    ByteQuantity,
    format_byte_quantity,
    parse_byte_quantity,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("64Gi", 64 * 2**30), ("500G", 500 * 10**9), ("256Mi", 2**28), ("2Ti", 2**41), ("3K", 3000)],
)
def test_byte_size_is_parsed(text: str, size: int) -> None:
    assert parse_byte_quantity(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "64 Gi", "-1Gi", "1.5Gi", "64GB", "0", "0Gi"])
def test_invalid_byte_size_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a size such as 64Gi, 512Mi or 500G"):
        TypeAdapter(ByteQuantity).validate_python(text)


@given(st.integers(min_value=1, max_value=2**50))
def test_formatted_byte_size_parses_to_the_same_number(size: int) -> None:
    assert parse_byte_quantity(format_byte_quantity(size)) == size


@pytest.mark.parametrize(
    ("text", "number"),
    [("250m", 0.25), ("2", 2), (4, 4), ("16Gi", 2**34), ("1.5k", 1500), ("1e3", 1000), ("100n", 1e-7)],
)
def test_quantities_are_parsed_in_kubernetes_notation(text: str | int, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "x", "1Q", "1 Gi"])
def test_text_that_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
