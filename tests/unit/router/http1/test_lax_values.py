"""Whole numbers and booleans are read as pydantic reads them, and so vLLM."""

from typing import Any

import orjson
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fulcrum_router.http1.bodies import parse_request_body
from fulcrum_router.http1.json_limits import InvalidBody
from fulcrum_router.http1.lax_values import parse_lax_bool, parse_lax_int

NUMBER = pydantic.TypeAdapter(int)


@given(
    value=st.one_of(
        st.integers(-(2**40), 2**40),
        st.floats(),
        st.booleans(),
        st.none(),
        st.from_regex(r"[ ]?[+-]?[0-9_.]{0,6}[ ]?", fullmatch=True),
        st.from_regex(r"[ \t\xa0\x1c\x85\u2003]*[+-]?0*[01_]{0,3}([.]0*)?[ \n\u3000\u200b]*", fullmatch=True),
    )
)
@example(value="100")
@example(value=" 7 ")
@example(value="1_000")
@example(value="5.0")
@example(value="5.")
@example(value="+3")
@example(value="0" * 5_000 + "128")
@example(value="128." + "0" * 5_000)
@example(value=" " * 25 + "128")
@example(value="\u00a0128")
@example(value="000__5")
@example(value="0_")
def test_a_number_is_read_as_pydantic_reads_it(value: Any) -> None:
    try:
        expected: int | None = NUMBER.validate_json(orjson.dumps(value))
    except pydantic.ValidationError:
        expected = None
    assert parse_lax_int(value) == expected


@pytest.mark.parametrize("value", ["100", 100.0, "1_00"])
def test_the_body_has_the_number_that_the_router_has_read(value: Any) -> None:
    body = parse_request_body(orjson.dumps({"prompt": "x", "max_tokens": value}), 0)
    assert (body.fields["max_tokens"], orjson.loads(body.raw)["max_tokens"]) == (100, 100)


@pytest.mark.parametrize("value", ["many", "", "1.5", "9" * 25, "1" * 5_000, "0" * 100_000, "0x10"])
@pytest.mark.parametrize("name", ["n", "max_tokens"])
def test_a_text_that_is_no_number_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidBody, match=f"{name} is not a whole number"):
        parse_request_body(orjson.dumps({"prompt": "x", name: value}), 0)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [("on", True), ("FALSE", False), (1.0, True), (2, None), ("ja", None), ([1], None)],
)
def test_a_boolean_may_be_a_word_or_a_number(value: Any, parsed: bool | None) -> None:
    assert parse_lax_bool(value) is parsed


def test_several_choices_in_words_are_several_choices() -> None:
    assert parse_request_body(b'{"prompt": "x", "n": "3"}', 0).choices == 3
