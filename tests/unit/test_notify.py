"""Notifications: sent once, at most one of a rule in a while, by channels that keep secrets."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.config.notify import NotifySection
from relax_actors.errors import ConfigError
from relax_actors.monitoring.finding import Finding
from relax_actors.monitoring.notify.channels import ChannelError, Command, Message, Webhook, channels_of, within
from relax_actors.monitoring.notify.notifier import Notifier, key_of
from relax_actors.monitoring.notify.sent import Sent
from relax_actors.runtime.run_folder import RunFolder
from tests.support.hooks import Hook, hooked
from tests.support.http_servers import serving
from tests.support.messages import assert_says
from tests.support.running import TINY

MakeNotifier = Callable[..., Notifier]
MESSAGE = Message("demo", "findings", "relax run demo has a problem", "the reward is 0", 1e9)
FLAT = Finding("the mean reward is 0 in all 12 steps", rule="flat_reward", remedy="read samples")


@pytest.fixture
def hook() -> Iterator[Hook]:
    with hooked() as found:
        yield found


@pytest.fixture
def claims() -> Iterator[Callable[[Path], Sent]]:
    """Make claims of a folder, and acquire them."""
    with ExitStack() as stack:

        def make(folder: Path) -> Sent:
            sent = Sent(folder / "sent.json")
            stack.callback(sent.close)
            assert sent.acquire()
            return sent

        yield make


@pytest.fixture
def notifier_of(hook: Hook, claims: Callable[[Path], Sent]) -> MakeNotifier:
    def make(folder: Path, **settings: Any) -> Notifier:
        section = NotifySection(webhook=hook.url, **settings)
        return Notifier("demo", RunFolder(folder), section, channels_of(section), claims(folder), began=1e9)

    return make


def test_webhook_gets_the_message_as_json(hook: Hook) -> None:
    Webhook(hook.url).send(MESSAGE)
    assert hook.messages == [MESSAGE.json()]


def test_errors_of_a_webhook_keep_its_url(hook: Hook) -> None:
    hook.status = 500
    with pytest.raises(ChannelError, match="the webhook answered 500") as refused:
        Webhook(hook.url).send(MESSAGE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/secret-token"
    with pytest.raises(ChannelError, match="did not answer: ConnectError") as away:
        Webhook(url).send(MESSAGE)
    assert "secret" not in f"{refused.value}{away.value}"


@contextmanager
def endless(head: bytes, piece: bytes) -> Iterator[str]:
    """Serve an answer that never ends: `head`, and then `piece` again and again; yield its URL."""
    ending = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with suppress(OSError):
                self.wfile.write(head)
                while not ending.wait(0.02):
                    self.wfile.write(piece)

        def log_message(self, *arguments: object) -> None:
            pass

    with serving(Handler) as url:
        try:
            yield url
        finally:
            ending.set()


def test_webhook_that_never_ends_its_head_is_left_after_its_deadline() -> None:
    with (
        endless(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x") as url,
        pytest.raises(ChannelError, match=r"the webhook took longer than 0\.5 s"),
    ):
        Webhook(url, seconds=0.5).send(MESSAGE)


def test_body_of_a_webhook_is_not_read() -> None:
    with endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1000) as url:
        Webhook(url).send(MESSAGE)


def test_channel_that_hangs_or_raises_anything_is_an_error_of_the_channel() -> None:
    def leak() -> None:
        raise KeyError("https://host/secret-token")

    with pytest.raises(ChannelError, match=r"a service took longer than 0\.1 s"):
        within(0.1, "a service", lambda: threading.Event().wait(60))
    with pytest.raises(ChannelError, match="a service failed: KeyError") as failed:
        within(60, "a service", leak)
    assert "secret" not in str(failed.value)


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise imports it
def test_services_of_apprise_get_title_and_text(hook: Hook) -> None:
    pytest.importorskip("apprise", reason="needs the extra `apprise`")
    service = hook.url.replace("http://", "json://")
    (channel,) = channels_of(NotifySection(apprise=("$SERVICE",)), {"SERVICE": service})
    channel.send(MESSAGE)
    assert (hook.messages[0]["title"], hook.messages[0]["message"]) == (MESSAGE.title, MESSAGE.text)
    hook.status = 500
    with pytest.raises(ChannelError, match="refused the message"):
        channel.send(MESSAGE)
    with pytest.raises(ConfigError, match=r"notify\.apprise: entry 1 is no URL of a service"):
        channels_of(NotifySection(apprise=("nothing",)))


def test_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    target = tmp_path / "message.json"
    program = (
        f"import shutil, sys; shutil.copyfileobj(sys.stdin, open({str(target)!r}, 'w')); sys.exit(len(sys.argv) - 2)"
    )
    Command((sys.executable, "-c", program, "$(touch no)")).send(MESSAGE)
    assert json.loads(target.read_text()) == MESSAGE.json()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["message.json"]
    with pytest.raises(ChannelError, match="exit code 2"):
        Command((sys.executable, "-c", program, "a", "b", "c")).send(MESSAGE)


def test_findings_are_sent_once_and_at_most_one_message_a_while(
    tmp_path: Path, hook: Hook, notifier_of: MakeNotifier
) -> None:
    notifier = notifier_of(tmp_path)
    notifier.findings = [FLAT]
    notifier.report_findings()
    notifier.findings = [
        Finding("the mean reward is 0 in all 90 steps", rule="flat_reward"),
        Finding("the disk is full"),
    ]
    notifier.report_findings()
    (first,) = hook.messages
    assert first["rule"] == "findings"
    assert_says(first["text"].splitlines()[0], "reward is 0", "12 steps")
    notifier.report_findings(at_once=True)
    assert hook.messages[1]["text"].splitlines()[0] == "the disk is full"
    notifier.report_findings(at_once=True)
    assert len(hook.messages) == 2


def test_later_message_of_a_rule_waits(tmp_path: Path, claims: Callable[[Path], Sent]) -> None:
    sent = claims(tmp_path)
    assert sent.is_due("findings", 60, 1000.0)
    sent.claim("findings", ["a"], 1000.0)
    assert not sent.is_due("findings", 60, 1059.0)
    assert sent.is_due("findings", 60, 1060.0)
    assert sent.is_due("findings", 60, 900.0)  # the clock was set back
    assert sent.is_due("started", 60, 1001.0)


def test_claims_outlive_the_process_that_made_them(tmp_path: Path, hook: Hook, notifier_of: MakeNotifier) -> None:
    notifier = notifier_of(tmp_path)
    notifier.conclude({"kind": "finished", "text": "8 steps"})
    assert not Sent(tmp_path / "sent.json").acquire()  # one at a time
    notifier.sent.close()
    notifier_of(tmp_path).conclude({"kind": "finished", "text": "8 steps"})
    assert [message["title"] for message in hook.messages] == ["relax run demo is finished"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"keys": 3}', '{"keys": [], "times": {"a": "b"}}'])
def test_damaged_claims_are_begun_anew(tmp_path: Path, damage: str, claims: Callable[[Path], Sent]) -> None:
    (tmp_path / "sent.json").write_text(damage)
    sent = claims(tmp_path)
    assert sent.is_new("a")
    sent.claim("findings", ["a"], 1.0)
    assert not sent.is_new("a")


def test_outcomes_have_rules_of_their_own(tmp_path: Path, hook: Hook, notifier_of: MakeNotifier) -> None:
    notifier = notifier_of(tmp_path)
    notifier.conclude({"kind": "stopped", "text": "stopped at step 3"})
    notifier.conclude({"kind": "gave_up", "text": "reward.0 failed"})
    notifier.conclude(None)
    titles = [message["title"] for message in hook.messages]
    assert titles == ["relax run demo gave up", "relax run demo has lost its `relax up`"]
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    notifier_of(quiet, on=("findings",)).conclude({"kind": "gave_up", "text": "reward.0 failed"})
    assert len(hook.messages) == 2


def test_end_is_sent_although_no_look_at_the_run_works(tmp_path: Path, hook: Hook, notifier_of: MakeNotifier) -> None:
    class Damaged(RunFolder):
        @property
        def address(self) -> Path:
            raise ZeroDivisionError

    notifier = notifier_of(tmp_path)
    notifier.folder = Damaged(tmp_path)
    notifier.look()
    notifier.conclude({"kind": "gave_up", "text": "reward.0 failed"})
    assert [message["title"] for message in hook.messages] == ["relax run demo gave up"]


def test_findings_that_differ_in_numbers_are_the_same() -> None:
    assert key_of(Finding("reward.0 has been down for 3.5 s")) == key_of(Finding("reward.1 has been down for 99 s"))
    assert key_of(FLAT) == "flat_reward"


def test_urls_may_be_named_by_variables(hook: Hook) -> None:
    (channel,) = channels_of(NotifySection(webhook="$HOOK"), {"HOOK": hook.url})
    channel.send(MESSAGE)
    assert len(hook.messages) == 1
    with pytest.raises(ConfigError, match=r"notify\.webhook .*HOOK, which is not set"):
        channels_of(NotifySection(webhook="$HOOK"), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set webhook, command or apprise"),
        ({"webhook": "ftp://x"}, "write https://"),
        ({"webhook": "http://x", "on": ["crashed"]}, "started"),
        ({"webhook": "http://x", "every": 0}, "greater than 0"),
    ],
)
def test_wrong_sections_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        NotifySection(**settings)  # type: ignore[arg-type]


def test_check_names_a_program_that_does_not_exist() -> None:
    found = examine(load_config(TINY, ['notify.command=["no-such-program"]']))
    assert_says(" ".join(found.errors), "notify.command", "'no-such-program'", "path")
