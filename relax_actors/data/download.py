"""Downloads of media: from allowed addresses, bounded, and checked by a hash."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import xxhash

from broker.shared_files import SharedFiles
from broker.store import Store
from relax_actors.config.media import MediaSection, UrlSection
from relax_actors.data.time_limit import call_within
from relax_actors.errors import DownloadError, RowError
from relax_actors.messages import MediaSource

_REDIRECTS = 5
_OK, _TOO_MANY, _SERVER_ERROR = 200, 429, 500
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Public addresses of IPv4 in networks of IPv6 alone; the last 32 bits are the address that is reached."""
_TUNNELS = tuple(
    ipaddress.IPv6Network(network)
    for network in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")
)
"""Other forms in which IPv6 carries addresses of IPv4: compatible, mapped, translated, local NAT64, Teredo, 6to4. No
public server has one of these alone."""


class Downloads:
    """Downloads of one actor into the store."""

    def __init__(self, media: MediaSection, store: Store, progress: Callable[[], None]) -> None:
        self._urls, self._store, self._shared, self._progress = media.urls, store, SharedFiles(store), progress
        self.count = 0
        """Downloads so far."""

    def fetch(self, source: MediaSource) -> None:
        """Download a medium to its path in the store, unless a row has left it there.

        Raises:
            RowError: the URL may not be used, its file is too large, or has another hash.
            DownloadError: another attempt may succeed.
        """
        if not self._urls.allow:
            msg = f"{source.origin}: {source.kind} {source.url[:200]} is a URL; set media.urls.allow = true"
            raise RowError(msg)
        folder = source.path.rpartition("/")[0]
        self._shared.link(f"{source.digest}.raw", folder, lambda: [self._download(source)])

    def _download(self, source: MediaSource) -> bytes:
        where = f"{source.origin}: {source.kind} {source.url[:200]}"
        try:
            data = download(source.url, self._urls, self._progress)
        except RowError as error:
            msg = f"{where}: {error}"
            raise RowError(msg) from error
        except (httpx.HTTPError, OSError) as error:
            msg = f"{where}: {type(error).__name__}: {error}"
            raise DownloadError(msg) from error
        except (httpx.InvalidURL, ValueError) as error:  # of the row, or of a redirection
            msg = f"{where}: no address that can be asked ({error}); correct the URL, or remove the row"
            raise RowError(msg) from error
        digest = xxhash.xxh3_128_hexdigest(data) if source.xxh3_128 else hashlib.sha256(data).hexdigest()
        if digest != source.digest:
            msg = f"{where} has hash {digest}, not {source.digest}; correct the row, or restore the file on its server"
            raise RowError(msg)
        self.count += 1
        return data


def download(url: str, settings: UrlSection, progress: Callable[[], None] = lambda: None) -> bytes:
    """Return the content of a URL; each redirection is checked like the URL itself.

    `progress` is called in another thread while the body arrives.

    Raises:
        RowError: the address may not be asked, the file is not there or too large.
        httpx.HTTPError: the server does not answer in time, or answers with an error of its own.
    """
    try:
        # In a thread: neither the look-up of a name nor headers that arrive byte by byte have a time limit in all.
        return call_within(settings.timeout, lambda: _follow(url, settings, progress))
    except TimeoutError as error:
        msg = f"the download took longer than media.urls.timeout = {settings.timeout:g} s"
        raise httpx.ReadTimeout(msg) from error


def _follow(url: str, settings: UrlSection, progress: Callable[[], None]) -> bytes:
    for _ in range(_REDIRECTS):
        answer = _ask(url, settings, progress)
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    msg = f"more than {_REDIRECTS} redirections, the last to {url[:200]}"
    raise RowError(msg)


def _ask(url: str, settings: UrlSection, progress: Callable[[], None]) -> bytes | str:
    """Return the content of a URL, or the location that it redirects to."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host:
        msg = f"{url[:200]} is neither http nor https; download the file"
        raise RowError(msg)
    if settings.hosts and host not in settings.hosts:
        msg = f"host {host} is not in media.urls.hosts; add it, or download the file"
        raise RowError(msg)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = _address(host, port, private=settings.private)
    # The address that was checked is the one that is asked: a second look-up could give another.
    literal = f"[{address}]" if ":" in address else address
    target = httpx.URL(url).copy_with(host=literal, port=port)
    extensions: dict[str, Any] = {"sni_hostname": host}
    headers = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity"}
    with (
        httpx.Client(trust_env=False, timeout=settings.timeout) as client,
        client.stream("GET", target, headers=headers, extensions=extensions) as answer,
    ):
        if answer.has_redirect_location:
            return answer.headers["location"]
        if answer.status_code >= _SERVER_ERROR or answer.status_code == _TOO_MANY:
            answer.raise_for_status()
        if answer.status_code != _OK:
            msg = f"the server answers {answer.status_code}; correct the URL, or remove the row"
            raise RowError(msg)
        return _body(answer, settings, progress)


def _body(answer: httpx.Response, settings: UrlSection, progress: Callable[[], None]) -> bytes:
    data = bytearray()
    # Raw: a compressed answer could unpack to any size.
    for chunk in answer.iter_raw():
        data += chunk
        if len(data) > settings.max_bytes:
            msg = f"the file has more than media.urls.max_bytes = {settings.max_bytes}; raise it, or remove the row"
            raise RowError(msg)
        progress()
    return bytes(data)


def _address(host: str, port: int, *, private: bool) -> str:
    """Return a host's permitted address; raises RowError if one of them is not."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in addresses:
        if not private and not _is_public(ipaddress.ip_address(text.partition("%")[0])):
            msg = f"host {host} has the address {text}, which is not public; set media.urls.private = true to allow it"
            raise RowError(msg)
    return addresses[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address, and that of IPv4 which a gateway would reach by it, are public."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    if any(address in network for network in _TUNNELS):
        return False
    return address not in _NAT64 or _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
