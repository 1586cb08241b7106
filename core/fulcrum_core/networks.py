"""Parse IP networks as users write them, and find out whether an address is in one of them.

The router finds trusted proxies with it; the operator checks what users wrote.
"""

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_network(text: str) -> Network | None:
    """The network of a text such as `10.0.0.0/8`; None if it is none, or has bits beyond its prefix."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def is_in_networks(address: str, networks: tuple[Network, ...]) -> bool:
    """Whether an IP address is in one of the networks; False for text that is no address.

    An IPv4 address that a dual-stack socket shows as IPv6 (`::ffff:10.0.0.1`) counts as the IPv4 address.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)
