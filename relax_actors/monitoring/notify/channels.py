"""Channels of notifications: a webhook, a command, and the services of Apprise.

A channel says in its errors what failed, and never the URL, which may hold a secret.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from relax_actors.config.notify import NotifySection
from relax_actors.errors import ConfigError, MissingPackageError

SECONDS = 10.0
"""Longest that a channel may take for a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """A notification.

    Attributes:
        run: name of the run.
        rule: what it is about: `started`, `finished`, `gave_up` or `findings`.
        title: one line.
        text: what happened.
        time: Unix time in seconds.
    """

    run: str
    rule: str
    title: str
    text: str
    time: float

    def json(self) -> dict[str, Any]:
        """Return the message as plain data."""
        return asdict(self)


class ChannelError(Exception):
    """A channel did not deliver a message."""


class Channel(Protocol):
    """A way to people."""

    def send(self, message: Message) -> None:
        """Deliver a message within `SECONDS`.

        Raises:
            ChannelError: it was not delivered, or it is not known whether it was.
        """


class Webhook:
    """Posts messages as JSON within `seconds`; redirects are not followed."""

    def __init__(self, url: str, seconds: float = SECONDS) -> None:
        self._url = url
        self._seconds = seconds

    def send(self, message: Message) -> None:
        """Post a message."""
        within(self._seconds, "the webhook", lambda: self._post(message))

    def _post(self, message: Message) -> None:
        import httpx  # noqa: PLC0415 a tenth of a second, and most runs send nothing

        try:
            # The body is not read: it has no use, and no bound.
            with httpx.stream("POST", self._url, json=message.json(), timeout=self._seconds) as answer:
                status, is_success = answer.status_code, answer.is_success
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            msg = f"the webhook did not answer: {type(error).__name__}"
            raise ChannelError(msg) from None  # its text may quote the URL
        if not is_success:
            msg = f"the webhook answered {status}"
            raise ChannelError(msg)


class Command:
    """Runs a program for each message, without a shell."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._arguments = arguments

    def send(self, message: Message) -> None:
        """Run the program with the message on its standard input."""
        try:
            done = subprocess.run(  # noqa: S603 the user's own program
                self._arguments,
                input=json.dumps(message.json()).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            msg = f"the command {self._arguments[0]} failed: {type(error).__name__}"
            raise ChannelError(msg) from error
        if done.returncode:
            msg = f"the command {self._arguments[0]} ended with exit code {done.returncode}"
            raise ChannelError(msg)


class Services:
    """Sends messages by Apprise; raises ConfigError if Apprise does not know one of them."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        import apprise  # noqa: PLC0415 an optional package

        self._apprise = apprise.Apprise()
        for n, url in enumerate(urls):
            if not self._apprise.add(url):
                msg = f"notify.apprise: entry {n + 1} is no URL of a service that Apprise knows; see its documentation"
                raise ConfigError(msg)

    def send(self, message: Message) -> None:
        """Send a message to all services."""
        within(SECONDS, "a service of notify.apprise", lambda: self._notify(message))

    def _notify(self, message: Message) -> None:
        if not self._apprise.notify(title=message.title, body=message.text):
            msg = "a service of notify.apprise refused the message"
            raise ChannelError(msg)


def within(seconds: float, name: str, send: Callable[[], object]) -> None:
    """Run a function in a thread for `seconds` at most; errors name it `name`.

    A timeout of an HTTP library bounds each of its waits, and so not the whole: an answer may come byte by byte.

    Raises:
        ChannelError: it raised an error, or is not done; whether the message was delivered is then unknown.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 plugins raise what they like
            errors.append(error)

    thread = threading.Thread(target=run, name="send", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        msg = f"{name} took longer than {seconds:g} s"
        raise ChannelError(msg)
    for error in errors:
        if isinstance(error, ChannelError):
            raise error
        msg = f"{name} failed: {type(error).__name__}"
        raise ChannelError(msg) from None  # its text may quote a URL


def channels_of(section: NotifySection, environment: Mapping[str, str] = os.environ) -> list[Channel]:
    """Return a section's channels; raises ConfigError."""
    channels: list[Channel] = []
    if section.webhook is not None:
        channels.append(Webhook(_resolved("notify.webhook", section.webhook, environment)))
    if section.command:
        if shutil.which(section.command[0]) is None:
            msg = f"notify.command: there is no program {section.command[0]!r}; give its path"
            raise ConfigError(msg)
        channels.append(Command(section.command))
    if section.apprise:
        if find_spec("apprise") is None:
            msg = "notify.apprise needs a package: pip install 'relax-actors[apprise]'"
            raise MissingPackageError(msg)
        channels.append(Services(tuple(_resolved("notify.apprise", url, environment) for url in section.apprise)))
    return channels


def check_notify(section: NotifySection | None) -> Iterator[str]:
    """Check that messages can be sent, and send nothing; raises as `channels_of`."""
    if section is not None:
        channels_of(section)
        rules = ", ".join(section.on)
        yield f"messages are sent for {rules}, at most one of each in {section.every:g} s"


def _resolved(setting: str, value: str, environment: Mapping[str, str]) -> str:
    if not value.startswith("$"):
        return value
    with suppress(KeyError):
        return environment[value[1:]]
    msg = f"{setting} names the environment variable {value[1:]}, which is not set; export it before `relax up`"
    raise ConfigError(msg)
