"""HTTP/1.1 on the wire: connections to engines, framing, request bodies, error responses."""
