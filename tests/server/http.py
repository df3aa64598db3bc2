"""Requests as bytes on a socket, for what well-behaved clients do not do."""

import json
import socket
from contextlib import contextmanager


def request_bytes(path, body, *, method="POST", headers=()):
    """A request; `body` is sent as JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


@contextmanager
def opened(up, path, body, *, headers=(), timeout=60):
    """A connection on which a request was sent."""
    with socket.create_connection(("127.0.0.1", up.port), timeout=timeout) as sock:
        sock.sendall(request_bytes(path, body, headers=headers))
        yield sock


def ask(up, path, body=b"", *, method="POST", headers=(), timeout=60):
    """Status, headers and body of a whole answer."""
    with socket.create_connection(("127.0.0.1", up.port), timeout=timeout) as sock:
        sock.sendall(request_bytes(path, body, method=method, headers=("Connection: close", *headers)))
        data = b""
        while part := sock.recv(65536):
            data += part
    head, _, content = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if fields.get("transfer-encoding") == "chunked":
        content = _joined(content)
    return int(status.split()[1]), fields, content


def get(up, path, **options):
    return ask(up, path, method="GET", **options)


def _joined(content):
    whole = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        n = int(size, 16)
        whole, content = whole + content[:n], content[n + 2 :]
    return whole


def read_until(sock, wanted):
    """Reads until the bytes appear; returns everything read."""
    data = b""
    while wanted not in data:
        part = sock.recv(65536)
        assert part, f"the connection was closed after {data[-500:]!r}"
        data += part
    return data


def events_of(data):
    """The JSON of each server-sent event."""
    lines = data.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
