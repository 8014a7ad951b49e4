"""Downloads whose URLs or redirections lead to addresses that are not public."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from relax_actors.config.media import UrlSection
from relax_actors.data.download import download
from relax_actors.errors import RowError
from tests.support.http_servers import served
from tests.support.public_addresses import PORT, PUBLIC

PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",  # noqa: S104 an address to refuse
    "[::1]",
    "[fe80::1]",
    "[fd00::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:0:127.0.0.1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b::169.254.169.254]",
    "[64:ff9b:1::a00:1]",
    "[64:ff9b:1:ffff::808:808]",
    "[2002:7f00:1::]",
    "[2002:a00:1::1]",
    "[2001:0:4136:e378:8000:63bf:3fff:fdd2]",
    "[ff02::1]",
    "2130706433",
    "0x7f.1",
]
"""Loopback, private, link-local and shared addresses, and those of IPv6 that carry one or may."""


@pytest.mark.parametrize("host", PRIVATE)
def test_address_that_is_not_public_is_refused_in_every_form(host: str) -> None:
    with pytest.raises(RowError, match=r"not public; set media\.urls\.private = true"):
        download(f"http://{host}:9/a.png", UrlSection(allow=True, timeout=2.0))


def has_namespaces() -> bool:
    """Whether this user may create a network namespace."""
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode  # noqa: PLW1510


@pytest.mark.skipif(not has_namespaces(), reason="no network namespace of its own: unshare -rn fails")
def test_redirection_is_checked_like_the_url_itself() -> None:
    private = (f"http://127.0.0.1:{PORT}/", f"http://[64:ff9b::127.0.0.1]:{PORT}/", f"//localhost:{PORT}/")
    targets = [f"http://{PUBLIC}:{PORT}/b.png", *private, "file:///etc/passwd"]
    command = ["unshare", "-rn", sys.executable, "-m", "tests.support.public_addresses", *targets]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    public, *refused, file = done.stdout.splitlines()
    assert public == "secret", "a redirection to a public address is followed"
    assert [("which is not public" in error) for error in refused] == [True] * len(private), refused
    assert "neither http nor https" in file


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would look the host name up by itself, and see what is downloaded."""
    with served({}) as proxy, served({"/a.png": b"own"}) as url:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.setenv("no_proxy", "")
        assert download(f"{url}/a.png", UrlSection(allow=True, private=True, timeout=10.0)) == b"own"
