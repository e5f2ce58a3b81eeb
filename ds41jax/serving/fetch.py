"""Fetches an image over HTTP(S) for a client, without becoming its way into our network.

Every host name is resolved here, every address is checked, and the connection is made to the
checked address, so that a name cannot change its mind in between. So it is with redirects.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from ds41jax.serving.errors import ApiError, invalid

MAX_REDIRECTS = 3
CONNECT_SECONDS = 10
IMAGE_SECONDS = 30
MAX_URL = 8192


async def fetch(url: str, path: str, max_bytes: int, private: bool) -> bytes:
    """The body at a URL.

    Args:
      path: where in the request the URL stands, for messages.
      private: allow addresses that are not public.

    Raises:
      ApiError: 400 for a URL that is refused, an answer other than 200, a body beyond the limit, or
        a fetch that takes too long.
    """
    try:
        async with asyncio.timeout(IMAGE_SECONDS):
            for _ in range(MAX_REDIRECTS + 1):
                target, data = await _get(url, path, max_bytes, private)
                if target is None:
                    return data
                url = urljoin(url, target)
    except TimeoutError as error:
        raise _fault(path, f"the image took more than {IMAGE_SECONDS} seconds") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise _fault(path, "the image cannot be fetched") from error
    except (OSError, UnicodeError, ValueError) as error:
        raise _fault(path, "the image cannot be fetched") from error
    raise _fault(path, f"the image lies behind more than {MAX_REDIRECTS} redirects")


async def _get(url: str, path: str, max_bytes: int, private: bool) -> tuple[str | None, bytes]:
    """(where a redirect leads, or None; the body)."""
    _check_url(url, path)
    timeouts = {"connect": CONNECT_SECONDS, "read": IMAGE_SECONDS, "write": CONNECT_SECONDS}
    backend = _CheckedBackend(path, private)
    context = ssl.create_default_context()
    async with (
        httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend) as pool,
        pool.stream(
            "GET",
            url,
            headers={"Accept": "image/*", "User-Agent": "ds41jax", "Accept-Encoding": "identity"},
            extensions={"timeout": timeouts},
        ) as response,
    ):
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in (301, 302, 303, 307, 308) and b"location" in headers:
            return headers[b"location"].decode("ascii"), b""
        if response.status != 200:
            raise _fault(path, f"the image's server answered {response.status}")
        body = bytearray()
        async for piece in response.aiter_stream():
            body += piece
            if len(body) > max_bytes:
                raise _fault(path, f"the image is larger than {max_bytes} bytes")
        return None, bytes(body)


def _check_url(url: str, path: str) -> None:
    parts = urlsplit(url)
    if len(url) > MAX_URL or parts.scheme not in ("http", "https") or not parts.hostname:
        raise _fault(path, "the image's URL must be http or https")
    if parts.username is not None or parts.password is not None:
        raise _fault(path, "the image's URL must not hold credentials")


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self, path: str, private: bool):
        self._path = path
        self._private = private
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed = [a for a in addresses if self._private or is_public(a)]
        if not allowed:
            raise _fault(self._path, "the image's URL leads to an address that is not public")
        return await self._backend.connect_tcp(allowed[0], port, timeout, local_address)


def is_public(address: str) -> bool:
    """Whether an address is on the public internet, also where it is wrapped in an IPv6 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        in_nat64 = ip in ipaddress.ip_network("64:ff9b::/96")
        if in_nat64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded and not is_public(str(embedded)):
            return False
    return ip.is_global and not ip.is_multicast


def _fault(path: str, message: str) -> ApiError:
    return invalid(path, f"{path}: {message}.", "invalid_image")
