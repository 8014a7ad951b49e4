"""The supervisor of a machine: one pool a role, one process an actor.

Started by the run's root as `python -m relax_actors.supervision.node <run folder>`. When a pool gives up, all are
stopped, a last report is written, and the root ends the run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import nats.errors
import structlog

from broker.bridge import Address, Bridge
from broker.files import write_private
from broker.lease import RunState
from broker.pull import give_back
from broker.streams import ensure_bucket
from broker.subjects import RowId, Subjects
from relax_actors.blackbox import BlackBox, Reading
from relax_actors.config import Config
from relax_actors.config.placement import OPTIONAL
from relax_actors.errors import BrokerUnreachableError, RelaxError
from relax_actors.exits import EXIT_AWAY, EXIT_CRASHED, EXIT_GAVE_UP
from relax_actors.journal import Journal
from relax_actors.roles import role_names
from relax_actors.runfolder import RunFolder
from relax_actors.supervision import logs
from relax_actors.supervision.forks import REPLY_SECONDS, Zygote
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.outcome import Status
from relax_actors.supervision.pools import SERVER, pools_of, server_launch, specs_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Blame, Exit, Failure
from relax_actors.supervision.streams import ensure_run_streams
from relax_actors.supervision.supervisor import GiveUp
from relax_actors.supervision.zygote import HOST, PRELOADED, PRELOADED_MODELLED

# Roles whose engines take seconds to import.
FORKED = ("rollout", "trainer", *OPTIONAL)
BEAT_SECONDS = 1.0
GRACE_SECONDS = 30.0
log = structlog.get_logger()


def actor_environment(config: Config) -> dict[str, str]:
    """What the processes of actors find in their environment."""
    threads = str(config.run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Sets and dictionaries of strings must have one order in every life: some task generators depend on it.
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Reporter:
    """Tells the run what happens to its actors, and counts deaths against the rows that were in hand."""

    def __init__(self, folder: RunFolder, bridge: Bridge, state: RunState, journal: Journal) -> None:
        self._folder, self._bridge, self._state, self._journal = folder, bridge, state, journal
        self._stream = journal.subjects.table_stream
        self._details: dict[str, str] = {}
        self.failure: Failure | None = None
        """Why the run cannot go on, if it cannot."""

    def started(self, child: str, pid: int, starts: int) -> None:
        """An actor's process was started."""
        role, n = split(child)
        kind = "started" if starts == 1 else "restarted"
        self._journal.event(kind, role=role, n=n, pid=pid, starts=starts)

    def ready(self, child: str, seconds: float) -> None:
        """An actor is ready."""
        role, n = split(child)
        self._journal.event("ready", role=role, n=n, seconds=round(seconds, 3))

    def ended(self, child: str, outcome: Exit, last: Reading) -> None:
        """An actor's process is gone."""
        role, n = split(child)
        if outcome.normal:
            self._journal.event("stopped", role=role, n=n)
            return
        self._details[child] = outcome.detail or outcome.reason
        self._journal.event(
            "crashed",
            role=role,
            n=n,
            reason=outcome.reason,
            rows=list(last.rows),
            traceback=outcome.detail[-4000:],
        )
        # What made an actor end through no fault of its rows needs time to pass: they wait for their lease to end.
        if outcome.blame is not Blame.NOBODY:
            self._bridge.submit(self._settle(role, outcome, last))

    async def _settle(self, role: str, outcome: Exit, last: Reading) -> None:
        """Count a death against the rows in hand, then let all that the actor had taken go to others at once."""
        outside = outcome.blame is Blame.OUTSIDE
        for text in last.rows:
            row = RowId.parse(text)
            await self._state.count_failure(role, row, outcome.reason, outcome.detail, outside=outside)
        await give_back(self._bridge, self._stream, role, last.taken)

    def inherit(self, child: str) -> None:
        """What an actor had taken when an earlier supervisor died, and it with that: let it go to others."""
        box = BlackBox(self._folder.box(child))
        taken = box.read_whole().taken
        box.close()
        self._bridge.submit(give_back(self._bridge, self._stream, split(child)[0], taken))

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """A role cannot be kept up."""
        detail = self._details.get(report.child, "")
        self._journal.event("gave_up", role=pool, n=split(report.child)[1], reason=report.reason)
        body = {"role": pool, "child": report.child, "reason": report.reason, "traceback": detail, "time": time.time()}
        self.failure = self.failure or Failure(report.child, report.reason, detail)
        # On a full disk the root hears of it by the status pipe only.
        with suppress(OSError):
            write_private(self._folder.report, json.dumps(body, indent=1))


class Heart(threading.Thread):
    """Beats the node's black box while its supervisor's loop goes round; starting an actor may hold the loop up."""

    def __init__(self, box: BlackBox) -> None:
        super().__init__(name="heart", daemon=True)
        self._box = box
        self.pulse = time.monotonic
        self.tell: Callable[[], object] = lambda: None
        self.watched: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Beat."""
        while True:
            if time.monotonic() - self.pulse() < REPLY_SECONDS + GRACE_SECONDS:
                self._box.beat()
                self.tell()
            self.watched()
            time.sleep(BEAT_SECONDS)


class Watched:
    """Has as many actors of each role as the run's saved configuration says, which `relax scale` changes.

    Args:
        folder: the run's.
        seen: `folder.state_of_config()` before the configuration was loaded that the actors were started by.
        tree: runs the actors.
    """

    def __init__(self, folder: RunFolder, seen: tuple[int, int], tree: ProcessTree) -> None:
        self._folder, self._tree = folder, tree
        self._seen = seen

    def __call__(self) -> None:
        """Look whether it has changed."""
        with suppress(OSError, RelaxError):
            changed = self._folder.state_of_config()
            if changed != self._seen:
                config = self._folder.load_config()
                for role in self._tree.pools:
                    self._tree.resize(role, specs_of(config, role))
                self._seen = changed


def split(child: str) -> tuple[str, int]:
    """Role and number of an actor's id."""
    role, _, n = child.rpartition(".")
    return role, int(n)


def run(folder: RunFolder) -> int:
    """Supervise until told to stop; gives the process's exit code."""
    status = Status()
    seen = folder.state_of_config()
    config = folder.load_config()
    heart = Heart(BlackBox(folder.box("node")))
    heart.start()
    bridge = Bridge(Address.load(folder.address), "node", deadline=30.0)
    subjects = Subjects(config.run.name)
    bridge.call(ensure_run_streams(bridge, config), 60)
    state = RunState(bridge, bridge.call(ensure_bucket(bridge, subjects, config.broker.replicas), 30))
    journal = Journal(bridge, subjects, "node", 0)
    reporter = Reporter(folder, bridge, state, journal)
    environment = actor_environment(config)

    # Modelled engines import nothing that is slow, but there may be very many actors.
    modelled = config.simulate is not None
    forked = role_names(config) if modelled else FORKED
    preloaded = PRELOADED_MODELLED if modelled else PRELOADED
    zygote = Zygote(
        folder.log("zygote"),
        folder.box("zygote"),
        os.environ | environment,
        start_deadline=config.supervision.start_deadline,
        heartbeat=config.supervision.heartbeat,
        modules=preloaded,
        say=lambda seconds: journal.event("waiting_for_import", role="zygote", seconds=seconds),
    )
    zygote.start()

    def launch(child: str) -> Launch:
        role, n = split(child)
        if role == SERVER:
            return server_launch(folder, n, environment)
        arguments = [str(folder.root), role, str(n)]
        command = [sys.executable, "-m", HOST, *arguments]
        launch = Launch(command, folder.log(child), folder.box(child), environment)
        return replace(launch, fork=partial(zygote.fork, arguments), gate=zygote.ready) if role in forked else launch

    pools = pools_of(config, random.Random(os.getpid()))  # noqa: S311 jitter
    for pool in pools.values():
        for child in pool.children:
            reporter.inherit(child)
    tree = ProcessTree(pools, launch, reporter, config.supervision.heartbeat, zygote.look_after)
    heart.pulse = lambda: tree.seen
    began, ttl = time.time(), max(2.0, config.supervision.heartbeat)

    def tell() -> None:
        lease = {"pid": os.getpid(), "since": began, "children": tree.states(), "zygote": zygote.state()}
        bridge.submit(state.renew_lease("node", 0, lease, ttl))

    heart.tell = tell
    heart.watched = Watched(folder, seen, tree)

    def told(*_: object) -> None:
        status.told()
        tree.stop()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status.ready()
    report = tree.run()
    heart.tell = lambda: None
    with suppress(RelaxError, nats.errors.Error):
        bridge.call(state.drop_lease("node", 0), 3)
    zygote.close()
    bridge.close()
    if report is None:
        return 0
    status.failed(f"{report.child}: {report.reason}")
    status.gave_up(reporter.failure or Failure(report.child, report.reason, ""))
    return EXIT_GAVE_UP


def main() -> None:
    """Entry point of the node's process."""
    logs.configure()
    try:
        code = run(RunFolder(Path(sys.argv[1])))
    except RelaxError as error:
        traceback.print_exc()
        Status().failed(str(error))
        code = EXIT_AWAY if isinstance(error, BrokerUnreachableError) else EXIT_CRASHED
    sys.exit(code)


if __name__ == "__main__":
    main()
