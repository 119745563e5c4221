"""Bytes of connections that no client sends."""

#: Bytes of a connection that are no request, or never become one.
RAW = (
    b"",
    b"\x00" * 1000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n",
    b"GET /%ff%00/../health HTTP/1.1\r\nHost: a\r\nX-Session-ID: \xff\xfe\r\n\r\n",
)
