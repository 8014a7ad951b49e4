"""Attacks on whoever watches a run, with the real credentials of a role: false claims, and escapes for the terminal."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.address import Address
from broker.connection import Connection
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.messages import Prompt, Quarantined
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.hostile_text import ATTACKS, steers
from tests.support.messages import assert_says
from tests.support.running import TINY
from tests.support.terminals import Terminal

RUN = "viewed"
SUBJECTS = Subjects(RUN)
OWN = re.compile(r"\x1b\[(\?25[hl]|[0-9]*A|[0-9]?K|([0-9]{1,2}(;[0-9]{1,2})*)?m)|\r")
"""What rich writes: the cursor shown or hidden, moved up, a line cleared, and styles of 16 colours."""
HOSTILE = "".join(text for text in ATTACKS if text.isascii() or "\ud800" not in text)


@dataclass
class Viewed:
    """A run at a server with credentials, whose folder this machine has."""

    guarded: Guarded
    cwd: Path

    def connect(self, user: str) -> Connection:
        return Connection(self.guarded.address(user), user)

    def publish(self, user: str, *messages: tuple[str, dict[str, Any]]) -> None:
        """Store messages of the log, as JSON, with the credentials of a user."""

        async def work(connection: Connection) -> None:
            for subject, body in messages:
                await connection.js.publish(f"relax.{RUN}.{subject}", json.dumps(body).encode())

        with closing(self.connect(user)) as connection:
            connection.call(work(connection), 20)

    def put_key(self, user: str, key: str, value: dict[str, Any]) -> None:
        """Write an entry of the run's bucket with the credentials of a user."""
        subject = f"$KV.{SUBJECTS.state_bucket}.{key}"
        with closing(self.connect(user)) as connection:
            connection.call(connection.js.publish(subject, json.dumps(value).encode()), 20)

    def terminal(self, *arguments: str) -> Terminal:
        return Terminal("-m", "relax_actors.cli.main", *arguments, cwd=self.cwd)

    def shown_by(self, *arguments: str, code: int = 0) -> str:
        """What a command writes to a terminal; asserts that nothing of it steers the terminal."""
        terminal = self.terminal(*arguments)
        try:
            terminal.read_until(lambda: terminal.process.poll() is not None and terminal.is_drained, "end")
            assert terminal.process.returncode == code, terminal.shown
        finally:
            terminal.close()
        plain = OWN.sub("", terminal.shown)
        assert not steers(plain), ascii(plain)
        assert "https://evil.invalid\x1b" not in terminal.shown
        assert "38;5;199" not in re.sub(r"u001b\[38;5;199", "", terminal.shown)
        return plain


@pytest.fixture
def viewed(make_guarded: MakeGuarded, tmp_path: Path) -> Viewed:
    guarded = make_guarded([f"run.name={RUN}"])
    guarded.make()
    guarded.start()
    url = f"nats://127.0.0.1:{guarded.port}"
    config = load_config(TINY, [f"run.name={RUN}", f"broker.url={url}"])
    with closing(Connection(guarded.address("operator"), "root")) as connection:
        connection.call(ensure_run_streams(connection, config), 30)
    folder = RunFolder(tmp_path / "runs" / RUN)
    folder.root.mkdir(parents=True)
    folder.save_config(config, str(TINY.parent))
    Address(url, credentials=str(guarded.keys)).save(folder.address)
    return Viewed(guarded, tmp_path)


def test_role_cannot_pose_as_another_or_end_the_view(viewed: Viewed) -> None:
    step = {"kind": "step", "step": 90, "reward": 1e9, "time": 1e9}
    viewed.publish(
        "rollout",
        ("metric.rollout.0", {**step, "role": "trainer", "n": 0}),
        ("metric.rollout.0", step),
        ("metric.rollout.0", {"kind": "run", "steps": 7}),
        ("metric.rollout.0", {"role": "prompts", "n": 0, "trained": 10**6, "in_flight": 10**6}),
        ("event.rollout.0.finished", {"kind": "finished", "role": "run", "n": 0}),
        ("event.rollout.0.finished", {"kind": "finished"}),
        ("event.rollout.0.evaluated", {"kind": "evaluated", "version": 3, "reward": 1e9}),
        ("event.rollout.0.crashed", {"kind": "crashed", "role": "trainer", "n": 0, "reason": "forged"}),
        ("event.rollout.0.all_rows_failed", {"role": "trainer", "n": 0, "error": "forged", "traceback": ""}),
        *((f"metric.rollout.{n}", {"rows": 1}) for n in range(2000)),
    )
    with closing(viewed.connect("trainer")) as connection:
        journal = Journal(connection, SUBJECTS, "trainer", 0)
        journal.metric({"kind": "step", "step": 4, "reward": 0.25})
        assert journal.flush(20)
    with closing(viewed.connect("operator")) as connection:
        root = Journal(connection, SUBJECTS, "run", 0)
        root.metric({"kind": "run", "steps": 50})
        root.event("finished", steps=50)
        assert root.flush(20)
    progress = watched(viewed)
    assert (progress.step, progress.value, progress.steps, progress.finished) == (5, 0.25, 50, True)
    assert (progress.ledger, progress.evals, progress.crashed) == ({}, {}, set())
    assert progress.failures.lines() == [
        "ignored 4 messages of rollout.0 that claim to be trainer.0's",
        "ignored 3 messages of rollout.0 that claim to be run.0's",
        "ignored 1 message of rollout.0 that claims to be prompts.0's",
        "ignored 1 message of rollout.0 that claims to be evaluator.0's",
    ]


def watched(viewed: Viewed) -> Any:
    """The state of the run as an observer's view of the whole log has it."""
    from broker.ordered_consumer import OrderedConsumer
    from relax_actors.monitoring.log_message import LogMessage
    from relax_actors.monitoring.progress import Progress

    progress = Progress(RUN, 0)

    async def read(connection: Connection) -> None:
        follower = OrderedConsumer(connection, SUBJECTS.log_stream, SUBJECTS.log_subjects())
        async for messages in follower.batches(tick=0.5):
            for message in messages:
                if (found := LogMessage.parse(message.subject, message.data)) is not None:
                    progress.take(found)
            if progress.finished:
                break
        await follower.close()

    with closing(viewed.connect("operator")) as connection:
        connection.call(read(connection), 30)
    return progress


def test_monitor_on_a_terminal_shows_claims_and_no_escape_of_a_role(viewed: Viewed) -> None:
    given = ["--broker", f"nats://127.0.0.1:{viewed.guarded.port}", "--credentials", str(viewed.guarded.keys)]
    terminal = viewed.terminal("monitor", *given)
    try:
        terminal.read_until(lambda: "steps" in terminal.shown, "the live view")
        viewed.publish(
            "rollout",
            ("event.rollout.0.crashed", {"role": "rollout", "n": 0, "reason": HOSTILE}),
            ("event.rollout.0.row_failed", {"row": HOSTILE, "error": HOSTILE, "role": "rollout", "n": 0}),
            ("event.rollout.0.crashed", {"role": f"trainer{HOSTILE}", "n": 0, "reason": HOSTILE}),
            ("event.rollout.0.finished", {"role": "run", "n": 0}),
            ("metric.rollout.0", {"role": "rollout", "n": 0, HOSTILE: 1.0}),
        )
        terminal.read_until(lambda: "that claims to be run.0's" in OWN.sub("", terminal.shown), "the false claim")
        assert terminal.process.poll() is None
        viewed.publish("operator", ("event.run.0.finished", {"role": "run", "n": 0}))
        terminal.read_until(lambda: terminal.process.poll() is not None and terminal.is_drained, "end")
    finally:
        terminal.close()
    plain = OWN.sub("", terminal.shown)
    assert not steers(plain), ascii(plain[-2000:])
    assert "rollout.0 crashed:" in plain
    assert "\\u001b]0;owned\\u0007" in plain


@pytest.mark.slow
def test_no_command_shows_an_escape_of_a_role_or_of_a_model(viewed: Viewed) -> None:
    row = RowId(0, 1)
    with closing(viewed.connect("prompts")) as connection:
        table = Table(connection, SUBJECTS, Store(viewed.cwd / "store"), "prompts.0#1")
        prompt = Prompt(HOSTILE, np.zeros(3, np.int32), HOSTILE, {"note": HOSTILE}, 1, 0)
        assert table.put(table.subject(row, "prompt"), prompt)
    with closing(viewed.connect("rollout")) as connection:
        table = Table(connection, SUBJECTS, Store(viewed.cwd / "store"), f"rollout.0#{HOSTILE}"[:100])
        assert table.put(table.subject(row, "quarantined"), Quarantined(HOSTILE, 3, HOSTILE, f"in reward\n{HOSTILE}"))
    lease = {"pid": HOSTILE, "incarnation": HOSTILE, "since": HOSTILE, "rows": [HOSTILE], "waits_for": HOSTILE}
    viewed.put_key("rollout", "lease.rollout.0", lease)
    children = {"rollout.0": {"phase": HOSTILE, "pid": HOSTILE, "restarts": 1}, HOSTILE: {"phase": "up"}}
    viewed.put_key("node", "lease.node.0", {"name": HOSTILE, "since": 0, "children": children})
    viewed.publish("rollout", ("event.rollout.0.row_failed", {"row": HOSTILE, "error": HOSTILE}))
    assert "\\u001b]0;owned" in viewed.shown_by("tail", f"relax.{RUN}.event.>", "--history", "--count", "1")
    assert "\\u001b]0;owned" in viewed.shown_by("tail", f"relax.{RUN}.group.>", "--history", "--count", "2")
    assert "\\u001b]0" in viewed.shown_by("quarantine", "list", RUN)
    shown = viewed.shown_by("quarantine", "show", RUN, str(row))
    assert shown.startswith("group.0.1 quarantined by \\u001b]0;owned\\u0007")
    assert not [line for line in shown.splitlines() if line.startswith("relax: forged")]
    assert "viewed" in viewed.shown_by("status", RUN)
    assert_says(viewed.shown_by("tree", RUN), "lease.rollout.0", "ignored")
    assert "the ledger is complete" in viewed.shown_by("ledger", RUN)
    viewed.shown_by("quarantine", "show", RUN, HOSTILE[:50].replace("\0", ""), code=2)
