"""Process that writes the record of a run, started by its root through `lean_process`.

It reads the table as an observer. It may be killed, stopped or missing: no role waits for it, and its failures are
restarted without a limit.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import structlog

from broker.address import Address
from broker.connection import Connection
from broker.permissions import OBSERVER, OPERATOR
from broker.store import Store
from broker.subjects import Subjects
from relax_actors.errors import AddressError, BrokerUnreachableError, RelaxError
from relax_actors.record.recorder import Recorder
from relax_actors.runtime import logs
from relax_actors.runtime.exit_codes import EXIT_BLAMELESS
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.outcome import StatusPipe

POLL_SECONDS = 1.0
REACH_SECONDS = 10.0
NICENESS = 10
"""The recorder yields the processor to actors, once it has started: the collector keeps rows for it meanwhile."""
log = structlog.get_logger()


def record(folder: RunFolder, status: StatusPipe, halt: threading.Event) -> None:
    """Record a run until `halt` is set, and what has ended until then; raises RelaxError."""
    settings = folder.load_settings()
    store = Store(settings.store_path)
    with closing(Connection(_address(folder), "recorder", REACH_SECONDS)) as connection:
        subjects = Subjects(settings.run.name)
        recorder = Recorder(connection, subjects, store, settings.record, settings.run.seed, folder.record)
        with closing(recorder):
            known = recorder.position
            status.recorded(asdict(known))
            status.ready()
            os.nice(NICENESS)
            while not halt.wait(POLL_SECONDS):
                with suppress(BrokerUnreachableError):  # it is being restarted
                    recorder.catch_up()
                if recorder.position != known:
                    known = recorder.position
                    status.recorded(asdict(known))
            recorder.catch_up()
        log.info("recorded", bytes=recorder.size, cpu_seconds=round(time.process_time(), 3))


def _address(folder: RunFolder) -> Address:
    """Return the address for an observer, or for the operator where the observer has no credentials."""
    address = Address.load(folder.address)
    try:
        return address.for_user(OBSERVER)
    except AddressError:
        return address.for_user(OPERATOR)


def main() -> int:
    """Record the run in the folder that the command line names; return the process's exit code."""
    status, halt, folder = StatusPipe(), threading.Event(), RunFolder(Path(sys.argv[1]))
    logs.configure()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def on_sigterm(*_: object) -> None:
        status.stop_requested()
        halt.set()

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        record(folder, status, halt)
    except (RelaxError, OSError) as error:
        # No configuration of the recorder may end the run, so this is never the exit code of a ConfigError.
        log.warning("recorder_failed", error=f"{type(error).__name__}: {error}")
        status.failed(f"{type(error).__name__}: {error}")
        return EXIT_BLAMELESS
    return 0


if __name__ == "__main__":
    sys.exit(main())
