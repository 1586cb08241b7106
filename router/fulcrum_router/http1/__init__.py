"""HTTP/1.1 towards engines: connections, framing, request bodies, patterns in responses, error responses."""
