"""HTTP/1.1 towards engines: connections, framing, request bodies, patterns in responses, error responses.

Also what both sides need: parsing of clients' requests, limits, TLS handshakes. The data path uses it;
nothing here knows a journey or a fleet.
"""
