"""Notifier: a process beside a run that looks at it from time to time, and tells people.

It reads the broker only, with a low priority. A run neither waits for it nor fails with it.
"""

from __future__ import annotations

import json
import re
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import nats.errors
import structlog

from broker.address import Address
from broker.server import is_listening
from relax_actors.config.notify import NotifySection
from relax_actors.errors import RelaxError
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.examination import examine
from relax_actors.monitoring.finding import Finding
from relax_actors.monitoring.notify.channels import Channel, ChannelError, Message
from relax_actors.monitoring.notify.sent import Sent
from relax_actors.printable import printable_lines
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import fetch_run_record

log = structlog.get_logger()
MAX_FINDINGS = 10
POLL_SECONDS = 1.0
LOOK_SECONDS = 10.0
"""Longest between two looks at whether the run is up or finished."""


@dataclass(slots=True)
class Notifier:
    """Sends messages about one run, each at most once."""

    run: str
    folder: RunFolder
    section: NotifySection
    channels: Sequence[Channel]
    sent: Sent
    began: float = 0.0
    """When this `relax up` began, in Unix seconds; 0 while unknown."""
    finished: bool = False
    findings: list[Finding] = field(default_factory=list)
    """Problems at the last look."""
    _claiming: threading.Lock = field(default_factory=threading.Lock)
    _examine_at: float = 0.0
    """When to look for findings again, by the monotonic clock."""

    def look(self) -> None:
        """Look at a live run, and send what is new; without a broker, look again later."""
        try:
            if not self._is_up():
                return
            with connected(str(self.folder.root)) as at:
                record = at.table.connection.call(fetch_run_record(at.state), 30)
                self.finished = record is not None and record.finished
                root = at.table.connection.call(at.state.leases("root"), 30).get("root.0")
                self._begin(root)
                if self._is_to_examine():
                    self.findings = [finding for finding in examine(at) if finding.is_problem]
            self.report_findings()
        except (RelaxError, nats.errors.Error, OSError, TimeoutError) as error:
            log.info("not_looked_at", error=f"{type(error).__name__}: {error}"[:300])
        except Exception:
            log.warning("look_failed", exc_info=True)

    def _is_up(self) -> bool:
        """Whether the broker may answer; connecting would start an embedded one."""
        address, is_own = self.folder.address, self.folder.load_settings().broker.url is None
        return address.exists() and (not is_own or is_listening(Address.load(address)))

    def _is_to_examine(self) -> bool:
        now = time.monotonic()
        if "findings" not in self.section.on or not self.began or self.finished or now < self._examine_at:
            return False
        self._examine_at = now + self.section.every
        return True

    def _begin(self, root: dict[str, Any] | None) -> None:
        since = root.get("since") if root else None
        if isinstance(since, int | float) and since != self.began:
            self.began = float(since)
            self.send("started", [f"started {self.began}"], "is up", "the run is up")

    def report_findings(self, *, at_once: bool = False) -> None:
        """Send the problems that were not reported yet, together, when a message of the rule is due."""
        new = {key: each for each in self.findings if self.sent.is_new(key := f"{self.began} {key_of(each)}")}
        if new and (at_once or self.sent.is_due("findings", self.section.every, time.time())):
            shown = [f"{each.text}. {each.remedy}".rstrip(". ") for each in new.values()]
            more = [f"and {len(shown) - MAX_FINDINGS} more"] if len(shown) > MAX_FINDINGS else []
            text = "\n".join([*shown[:MAX_FINDINGS], *more, f"`relax doctor {self.run}` shows the evidence"])
            title = "has a problem" if len(new) == 1 else f"has {len(new)} problems"
            self.send("findings", list(new), title, text)

    def conclude(self, outcome: dict[str, Any] | None) -> None:
        """Send how `relax up` ended: its last line, or None if it was killed."""
        self.report_findings(at_once=True)
        if outcome is None:
            text = "`relax up` was killed, and the run is down with it; the same `relax up` resumes it"
            self.send("gave_up", [f"vanished {self.began}"], "has lost its `relax up`", text)
        elif outcome.get("kind") == "finished":
            self.send("finished", [f"finished {self.began}"], "is finished", str(outcome.get("text", "")))
        elif outcome.get("kind") == "gave_up":
            self.send("gave_up", [f"gave up {self.began}"], "gave up", str(outcome.get("text", "")))

    def send(self, rule: str, keys: list[str], title: str, text: str) -> None:
        """Claim a message and send it to all channels; failures are logged."""
        now = time.time()
        with self._claiming:
            if rule not in self.section.on or not any(map(self.sent.is_new, keys)):
                return
            self.sent.claim(rule, keys, now)
        message = Message(self.run, rule, f"relax run {self.run} {title}", printable_lines(text), now)
        for channel in self.channels:
            try:
                channel.send(message)
            except ChannelError as error:
                log.warning("message_not_sent", rule=rule, error=str(error))
            else:
                log.info("message_sent", rule=rule, channel=type(channel).__name__)


def key_of(finding: Finding) -> str:
    """Return what makes two findings the same although their numbers differ."""
    return finding.rule or re.sub(r"[\d.]+", "#", finding.text)[:120]


def follow(notifier: Notifier, parent: IO[str] | None) -> None:
    """Look at a run until it has ended.

    `relax up` writes its outcome to the pipe `parent` as one line and closes it; without a pipe the end of the run is
    seen in its record.
    """
    every = min(notifier.section.every, LOOK_SECONDS)
    looking: threading.Thread | None = None
    look_at = 0.0
    while True:
        if time.monotonic() >= look_at and (looking is None or not looking.is_alive()):
            # A look waits long for a broker that has just ended; the end of the run is told meanwhile.
            looking = threading.Thread(target=notifier.look, name="look", daemon=True)
            looking.start()
            look_at = time.monotonic() + every
        if parent is None:
            time.sleep(min(POLL_SECONDS, every))
            if notifier.finished:
                notifier.conclude({"kind": "finished", "text": "all steps are trained"})
                return
        elif select.select([parent], [], [], min(POLL_SECONDS, every))[0]:
            notifier.conclude(outcome_of(parent.readline()))
            return


def outcome_of(line: str) -> dict[str, Any] | None:
    """Return what `relax up` wrote at its end; None if it wrote nothing."""
    with suppress(ValueError):
        body = json.loads(line)
        return body if isinstance(body, dict) else None
    return None
