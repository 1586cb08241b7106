"""Sockets of the programs: one address, or all addresses of both families."""

import socket

import pytest

from fulcrum_cluster.process import ANY_ADDRESS, bind_socket


def connects(family: socket.AddressFamily, address: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        return client.connect_ex((address, port)) == 0


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"]
)
def test_any_address_accepts_clients_of_both_families(family: socket.AddressFamily, address: str) -> None:
    if family is socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with bind_socket(ANY_ADDRESS, 0, option="--port") as bound:
        bound.listen()
        assert connects(family, address, bound.getsockname()[1])


def test_an_address_accepts_only_its_own_family() -> None:
    with bind_socket("127.0.0.1", 0, option="--port") as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert (
            connects(socket.AF_INET, "127.0.0.1", port),
            socket.has_dualstack_ipv6() and connects(socket.AF_INET6, "::1", port),
        ) == (True, False)
