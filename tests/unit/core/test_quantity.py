"""Sizes as Kubernetes writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fulcrum_core.api.quantity import ByteQuantity, format_byte_quantity, parse_byte_quantity


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("64Gi", 64 * 2**30), ("500G", 500 * 10**9), ("256Mi", 2**28), ("2Ti", 2**41), ("3K", 3000)],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_byte_quantity(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "64 Gi", "-1Gi", "1.5Gi", "64GB", "0", "0Gi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a size such as 64Gi, 512Mi or 500G"):
        TypeAdapter(ByteQuantity).validate_python(text)


@given(st.integers(min_value=1, max_value=2**50))
def test_every_size_is_read_back_as_written(size: int) -> None:
    assert parse_byte_quantity(format_byte_quantity(size)) == size
