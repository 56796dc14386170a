"""Which requests a server answers: by their Host header and their key."""

import hmac

from starlette.datastructures import Headers

from penjing.serve.errors import ApiError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_host(headers: Headers) -> None:
    """For a server that listens on this machine only. Another name in the Host header is a DNS rebinding attack."""
    hosts = headers.getlist("host")
    if len(hosts) != 1 or host_name(hosts[0]) not in LOOPBACK:
        raise ApiError(403, "this server answers to localhost only: wrong Host header", code="wrong_host")


def check_key(headers: Headers, expected: bytes) -> None:
    values = headers.getlist("authorization")
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1"), expected):
        raise ApiError(401, "wrong or missing API key; send Authorization: Bearer KEY", code="invalid_api_key")


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    return (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0].lower()
