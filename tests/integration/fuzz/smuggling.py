"""Requests that two servers may read in two ways: the corpus of the request reader.

Each case holds bytes of one connection, and what the router makes of them: the bodies of the requests that it
serves, and the status with which it rejects the rest (None: nothing is rejected).
"""

from typing import NamedTuple

HOST = b"host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


class Case(NamedTuple):
    """Bytes of one connection, and what the router makes of them."""

    data: bytes
    bodies: list[bytes]
    rejection: int | None


def post(*header_lines: bytes, body: bytes = b"") -> bytes:
    """A request with these header lines."""
    return POST + b"".join(line + b"\r\n" for line in header_lines) + b"\r\n" + body


CASES: dict[str, Case] = {
    # --- what is served ---
    "a length": Case(post(b"content-length: 2", body=b"{}"), [b"{}"], None),
    "chunks": Case(post(CHUNKED[:-2], body=b"2\r\n{}\r\n0\r\n\r\n"), [b"{}"], None),
    "chunks of more than a piece": Case(
        post(CHUNKED[:-2], body=(b"1000\r\n" + b"x" * 4_096 + b"\r\n") * 5 + b"0\r\n\r\n") + GET,
        [b"x" * 20_480, b""],
        None,
    ),
    "chunks in capitals": Case(
        post(b"Transfer-Encoding: Chunked", body=b"2\r\n{}\r\n0\r\n\r\n"), [b"{}"], None
    ),
    "a chunk extension": Case(post(CHUNKED[:-2], body=b"2;a=b\r\n{}\r\n0;c\r\n\r\n"), [b"{}"], None),
    "trailers": Case(post(CHUNKED[:-2], body=b"2\r\n{}\r\n0\r\nx: y\r\n\r\n"), [b"{}"], None),
    "trailers that name a length": Case(
        post(CHUNKED[:-2], body=b"2\r\n{}\r\n0\r\ncontent-length: 9\r\n\r\n") + GET, [], 400
    ),
    "pipelined requests": Case(post(b"content-length: 2", body=b"{}") + GET + GET, [b"{}", b"", b""], None),
    "a body on GET": Case(
        b"GET /health HTTP/1.1\r\n" + HOST + b"content-length: 2\r\n\r\n{}" + GET, [b"{}", b""], None
    ),
    "an upgrade with a body": Case(
        post(b"connection: upgrade", b"upgrade: h2c", b"content-length: 2", body=b"{}") + GET,
        [b"{}", b""],
        None,
    ),
    "an upgrade with chunks": Case(
        post(b"connection: upgrade", b"upgrade: h2c", CHUNKED[:-2], body=b"2\r\n{}\r\n0\r\n\r\n") + GET,
        [b"{}", b""],
        None,
    ),
    "an upgrade that closes": Case(
        post(b"connection: close, upgrade", b"upgrade: h2c", b"content-length: 2", body=b"{}") + GET,
        [b"{}"],
        None,
    ),
    "a request after a close": Case(
        post(b"connection: close", b"content-length: 2", body=b"{}") + GET, [b"{}"], None
    ),
    "a target in absolute form": Case(b"GET http://x/health HTTP/1.1\r\n" + HOST + b"\r\n", [b""], None),
    "an empty length": Case(post(b"content-length:"), [], 400),
    # --- two lengths ---
    "a length and chunks": Case(post(b"content-length: 5", CHUNKED[:-2], body=b"0\r\n\r\n" + GET), [], 400),
    "chunks and a length": Case(post(CHUNKED[:-2], b"content-length: 5", body=b"0\r\n\r\n" + GET), [], 400),
    "two lengths": Case(post(b"content-length: 2", b"content-length: 0", body=b"{}"), [], 400),
    "the same length twice": Case(post(b"content-length: 2", b"Content-Length: 2", body=b"{}"), [], 400),
    "a list of lengths": Case(post(b"content-length: 2, 2", body=b"{}"), [], 400),
    "a signed length": Case(post(b"content-length: +2", body=b"{}"), [], 400),
    "a negative length": Case(post(b"content-length: -2", body=b"{}"), [], 400),
    "a hexadecimal length": Case(post(b"content-length: 0x2", body=b"{}"), [], 400),
    "a length beyond 64 bits": Case(post(b"content-length: 18446744073709551618", body=b"{}"), [], 400),
    "a length with a space inside": Case(post(b"content-length: 1 2", body=b"{}"), [], 400),
    # --- transfer codings ---
    "another coding": Case(post(b"transfer-encoding: gzip", body=b"0\r\n\r\n"), [], 501),
    "a coding before chunks": Case(post(b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"), [], 501),
    "identity and chunks": Case(
        post(b"transfer-encoding: identity", CHUNKED[:-2], body=b"0\r\n\r\n" + GET), [], 400
    ),
    "chunks twice": Case(post(CHUNKED[:-2], CHUNKED[:-2], body=b"0\r\n\r\n" + GET), [], 400),
    "chunks in quotes": Case(post(b'transfer-encoding: "chunked"', body=b"0\r\n\r\n"), [], 501),
    "xchunked": Case(post(b"transfer-encoding: xchunked", body=b"0\r\n\r\n"), [], 501),
    "chunks after a vertical tab": Case(post(b"transfer-encoding: \x0bchunked", body=b"0\r\n\r\n"), [], 400),
    "an underscore in the name": Case(
        post(b"transfer_encoding: chunked", b"content-length: 0") + GET, [b"", b""], None
    ),
    "chunks in HTTP/1.0": Case(
        b"POST / HTTP/1.0\r\n" + CHUNKED + b"connection: keep-alive\r\n\r\n0\r\n\r\n", [], 501
    ),
    # --- names and line ends ---
    "a space before the colon": Case(post(b"content-length : 2", body=b"{}"), [], 400),
    "a tab before the colon": Case(post(b"transfer-encoding\t: chunked", body=b"0\r\n\r\n"), [], 400),
    "a folded header": Case(post(b"x: a", b" content-length: 2", body=b"{}"), [], 400),
    "a folded coding": Case(post(b"transfer-encoding:", b" chunked", body=b"0\r\n\r\n"), [], 400),
    "a first line that is folded": Case(b"GET /health HTTP/1.1\r\n " + HOST + b"\r\n", [], 400),
    "bare line feeds": Case(GET.replace(b"\r\n", b"\n"), [], 400),
    "a bare line feed in a head": Case(post(b"x: a\ncontent-length: 2", body=b"{}"), [], 400),
    "a bare carriage return": Case(post(b"x: a\rcontent-length: 2", body=b"{}"), [], 400),
    "a null byte": Case(post(b"x: a\0b"), [], 400),
    "a line without a colon": Case(post(b"content-length 2", body=b"{}"), [], 400),
    "an empty name": Case(post(b": 2"), [], 400),
    # --- chunk framing ---
    "a chunk size with a sign": Case(post(CHUNKED[:-2], body=b"+2\r\n{}\r\n0\r\n\r\n"), [], 400),
    "a chunk size with a prefix": Case(post(CHUNKED[:-2], body=b"0x2\r\n{}\r\n0\r\n\r\n"), [], 400),
    "a chunk size with a space": Case(post(CHUNKED[:-2], body=b" 2\r\n{}\r\n0\r\n\r\n"), [], 400),
    "an empty chunk size": Case(post(CHUNKED[:-2], body=b"\r\n{}\r\n0\r\n\r\n"), [], 400),
    "a chunk size beyond 64 bits": Case(post(CHUNKED[:-2], body=b"1" + b"0" * 16 + b"\r\n"), [], 400),
    "a chunk longer than its size": Case(post(CHUNKED[:-2], body=b"1\r\n{}\r\n0\r\n\r\n"), [], 400),
    "a chunk that ends in a line feed": Case(post(CHUNKED[:-2], body=b"2\n{}\n0\n\n"), [], 400),
    "an extension with a line feed": Case(post(CHUNKED[:-2], body=b"2;\n{}\r\n0\r\n\r\n"), [], 400),
    # --- the request line and Host ---
    "no host": Case(b"GET /health HTTP/1.1\r\n\r\n", [], 400),
    "no host in HTTP/1.0": Case(b"GET /health HTTP/1.0\r\n\r\n", [b""], None),
    "two hosts": Case(b"GET /health HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n", [], 400),
    "a space in the target": Case(b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", [], 400),
    "no version": Case(b"GET /health\r\n\r\n", [], 505),
    "a later version": Case(b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", [], 505),
    "an earlier version": Case(b"GET /health HTTP/0.9\r\n" + HOST + b"\r\n", [], 505),
    "the preface of HTTP/2": Case(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [], 400),
    "CONNECT": Case(b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"\r\n" + GET, [], 405),
    "an unknown method": Case(b"SMUGGLE / HTTP/1.1\r\n" + HOST + b"\r\n", [], 400),
    "another protocol": Case(b"SOURCE / ICE/1.0\r\n" + HOST + b"\r\n", [], 501),
    "an unknown expectation": Case(post(b"expect: more", b"content-length: 2", body=b"{}"), [], 417),
}
