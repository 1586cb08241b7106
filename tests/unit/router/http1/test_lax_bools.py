"""Booleans of a client's JSON, compared with pydantic itself."""

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fulcrum_router.http1.lax_bools import parse_lax_bool

BOOL = TypeAdapter(bool)
WORDS = st.sampled_from(
    ["0", "1", "on", "off", "t", "f", "true", "false", "y", "n", "yes", "no", "FALSE", "yEs", "2", "ja"]
)


def read_with_pydantic(value: object) -> bool | None:
    try:
        return BOOL.validate_python(value)
    except ValidationError:
        return None


@given(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=True)
    | st.sampled_from([0.0, 1.0, -0.0, 0.5])
    | WORDS
    | WORDS.map(lambda word: f" {word}")
    | st.text(max_size=5)
    | st.lists(st.booleans(), max_size=1)
    | st.dictionaries(st.text(max_size=1), st.booleans(), max_size=1)
)
def test_a_value_is_read_as_pydantic_reads_it(value: object) -> None:
    assert parse_lax_bool(value) is read_with_pydantic(value)
