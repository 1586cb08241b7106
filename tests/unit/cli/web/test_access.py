"""Only the page itself, with its token, may call the live page's server."""

import pytest

from fulcrum_cli.web.access import check_call, check_host

TOKEN = "secret"
OWN = {"Host": "127.0.0.1:8123", "Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        {**OWN, "Origin": "http://127.0.0.1:8123", "Sec-Fetch-Site": "same-origin"},
        {**OWN, "Host": "localhost:9000", "Origin": "http://localhost:9000"},
        {**OWN, "Host": "[::1]:9000"},
    ],
    ids=["a program with the token", "the page", "the page behind a forwarded port", "IPv6"],
)
def test_the_page_itself_may_call(headers: dict[str, str]) -> None:
    assert check_call(headers, token=TOKEN) is None


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"Host": "attacker.example:8123"}, 421),
        ({"Host": "127.0.0.1.attacker.example"}, 421),
        ({"Host": ""}, 421),
        ({"Host": "[::1"}, 421),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Origin": "https://127.0.0.1:8123"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer sécret"}, 401),
        ({"Authorization": "Bearer s\udce9cret"}, 401),
    ],
    ids=lambda value: str(value),
)
def test_all_others_are_refused(change: dict[str, str], status: int) -> None:
    refused = check_call({**OWN, **change}, token=TOKEN)
    assert refused is not None
    assert refused.status == status


def test_a_foreign_name_gets_no_page_either() -> None:
    assert check_host({"Host": "localhost:1"}) is None
    assert check_host({"Host": "rebound.example"}) is not None
