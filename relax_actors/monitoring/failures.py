"""Failures of a run for people: a sentence an event, and counts by role and error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_actors.counted import counted
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.printable import printable

LINE_SECONDS = 5.0
"""Least time between two lines about the same failure."""
MAX_KEYS, MAX_ROLES = 16, 64
"""Errors of a role, and roles, that are counted one by one."""
MAX_LINE = 300


def sentence(event: LogMessage) -> str:
    """Describe an event in one sentence; empty for events that are not shown."""
    body, role = event.body, event.role
    row, n = body.get("row"), body.get("version")
    why = _first_line(body.get("reason") or body.get("error") or body.get("detail"))
    who = role if event.kind in ("down", "repaired") else event.sender  # the broker or a node has no number
    texts = {
        "strays_removed": f"{body.get('cells')} stray cells by {body.get('by')} removed, {body.get('mib')} MiB",
        "repair_failed": f"{who} cannot look for lost rows, and tries again: {why}",
        "sweep_failed": f"{who} cannot clean the table up, and tries again: {why}",
        "table_full": f"the table is {full_table(body)}",
        "fault": f"relax chaos hits {body.get('target')}",
        "waiting_for_room": f"{who} waits for free disk space: {why}",
        "crashed": f"{who} crashed: {why}; it is restarted",
        "down": f"{who} crashed: {why}; it is restarted",
        "repaired": f"{who} recovered after {body.get('seconds')} s",
        "waiting_for_import": f"packages are still being imported after {body.get('seconds')} s",
        "resuming": resuming(body) if event.kind == "resuming" else "",
        "row_quarantined": f"{row} failed for good in {role}: {why}",
        "row_dropped": f"{row} dropped ({body.get('reason')}): {_first_line(body.get('detail'))}",
        "row_lost": f"{row} is delivered to {body.get('by')} again: {why}",
        "row_kept": f"{row} is taken back from role {body.get('by')}: {why}",
        "row_failed": f"{row} failed in {role} and is tried again: {why}",
        "agent_without_reward": f"the agent of session {body.get('session')} ended without a reward",
        "all_rows_failed": f"{who} stopped the run: {why}",
        "gave_up": f"{who} cannot be kept running: {why}",
        "replay_diverged": f"{who} computed other weights for version {n} than before its restart",
        "evaluated": f"version {n} scored {_rounded(body.get('reward'))} on held-out prompts",
    }
    return _line(texts.get(event.kind, ""))


def resuming(body: dict[str, Any]) -> str:
    """Describe how a trainer catches up after its start, by event `resuming`."""
    version, steps = int(body.get("version", 0)), int(body.get("replays", 0))
    return f"resuming from checkpoint {version}" + (f", replaying {counted(steps, 'step')}" if steps else "")


def full_table(body: dict[str, Any]) -> str:
    """Describe a table that is nearly full, by event `table_full`."""
    by = f" of strays by {body['by']}; stop it, or rotate its keys" if body.get("by") else "; raise broker.max_bytes"
    return f"{str(body.get('percent'))[:8]} % full{by}"


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


@dataclass(slots=True)
class _Count:
    text: str = ""
    quarantined: int = 0
    retried: int = 0
    crashes: int = 0
    ignored: int = 0
    actor: str = ""
    changed: bool = False
    printed_at: float = float("-inf")


class FailureCounts:
    """Failures of rows and actors, and ignored messages, counted by role and error.

    No role can fill the counts of another. Times are seconds on the monotonic clock.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def take(self, event: LogMessage) -> None:
        """Count an event; events that report no failure are ignored."""
        body, kind, role, n = event.body, event.kind, event.role, 1
        text = _first_line(body.get("reason") or body.get("error"))
        if kind == "suppressed":
            # The journal leaves out events of a flood and counts them.
            kind, n, text = str(body.get("of")), max(0, min(int(body.get("count", 0)), 1 << 40)), ""
        if kind in ("crashed", "down"):
            count = self._count(role, "", text)
            count.crashes += n
            count.actor = role if kind == "down" else event.sender
        elif kind in ("row_quarantined", "row_failed", "row_kept", "row_lost"):
            role = str(body.get("by"))[:64] if kind in ("row_kept", "row_lost") and role == "root" else role
            count = self._count(role, text.split(":", 1)[0] if text else self._last_error(role), text)
            count.quarantined += n if kind == "row_quarantined" else 0
            count.retried += n if kind != "row_quarantined" else 0

    def ignored(self, message: LogMessage) -> None:
        """Count a message that claims to be what it is not."""
        count = self._count(message.role, f"claims {message.claim}", message.claim)
        count.ignored += 1
        count.actor = message.sender

    def _count(self, role: str, error: str, text: str) -> _Count:
        if (key := (role, error[:80])) not in self._counts:
            known = [name for name, _ in self._counts]
            if role not in known and len(set(known)) >= MAX_ROLES:
                key = ("other roles", error[:80] and "errors")
            elif known.count(role) >= MAX_KEYS:
                key = (role, error[:80] and "other errors")
        count = self._counts.setdefault(key, _Count())
        count.text, count.changed = text or count.text, True
        return count

    def _last_error(self, role: str) -> str:
        return next((error for name, error in reversed(self._counts) if name == role and error), "unknown error")

    def lines(self) -> list[str]:
        """Return one line for each role and error, the first failure first."""
        return [_summary(role, count) for (role, _), count in list(self._counts.items())]

    def due(self, now: float) -> list[str]:
        """Return the lines to print now: new failures, and known ones every `LINE_SECONDS`."""
        lines = []
        for (role, _), count in list(self._counts.items()):
            if count.changed and now - count.printed_at >= LINE_SECONDS:
                count.changed, count.printed_at = False, now
                lines.append(_summary(role, count))
        return lines


def _summary(role: str, count: _Count) -> str:
    if count.ignored:
        messages = counted(count.ignored, "message")
        verb = "claims" if count.ignored == 1 else "claim"
        return _line(f"ignored {messages} of {count.actor} that {verb} to be {count.text}'s")
    if count.crashes:
        times = f"crashed {count.crashes} times, the last time {count.actor}" if count.crashes > 1 else "crashed"
        return _line(f"{role if count.crashes > 1 else count.actor} {times}: {count.text}; it is restarted")
    parts = [f"{counted(count.quarantined, 'row')} quarantined"] if count.quarantined else []
    parts += [f"{counted(count.retried, 'failure')} tried again"] if count.retried else []
    return _line(f"{role}: {', '.join(parts)}: {count.text}")


def _first_line(text: Any) -> str:
    return str(text or "").strip().split("\n", 1)[0]


def _line(text: str) -> str:
    return printable(text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 4]} ...")
