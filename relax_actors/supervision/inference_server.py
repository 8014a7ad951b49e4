"""Keeper of an inference server: the process of the server of one rollout actor, as a separate child of the node.

The actor and the server survive each other's death. The node's supervisor starts this process as
`python -m relax_actors.supervision.inference_server RUN_FOLDER NUMBER`. It leads the process group of the server, which
the backend's `ServerSpec` describes, publishes the server's address once it generates, and ends when the server ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from broker.process import spawn
from relax_actors.devices.binding import bind_to_cores
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols.server import ServerRecord, ServerSpec, answers, free_port, generates
from relax_actors.isolation.janitor import Janitor
from relax_actors.isolation.proc import process
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.device_files import device_locks, is_held_by, kept_free
from relax_actors.runtime.exit_codes import EXIT_BLAMELESS, EXIT_CRASHED
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.outcome import StatusPipe

POLL_SECONDS, ASK_SECONDS = 0.25, 5.0


class InferenceServerProcess:
    """One incarnation of an inference server.

    Args:
        folder: the folder of the node.
        n: number of the actor that the server is for.
        spec: how the server is started and asked.
        may_start: whether the server may take its memory. Where roles take turns on its device, this is the turn of the
            server's actor, which waits for the server.
        locks: lock files of the devices on which roles take turns.
    """

    def __init__(
        self, folder: RunFolder, n: int, spec: ServerSpec, may_start: Callable[[], bool], locks: Sequence[Path] = ()
    ) -> None:
        self._spec, self._may_start, self._locks, self._name = spec, may_start, locks, f"server.{n}"
        self._status = StatusPipe()
        self._box = BlackBox(folder.black_box(f"server.{n}"))
        self._record_path = folder.server(n)
        self._record_path.unlink(missing_ok=True)
        settings = folder.load_config().supervision
        heartbeat, self._longest_start = settings.heartbeat, settings.longest_start
        self._beats, self._answer = min(1.0, heartbeat / 4), heartbeat / 2
        self._stop_requested, self._had_turn = False, True
        # A killed server leaves the names of its sockets behind.
        scratch = tempfile.mkdtemp(prefix="relax-server-")
        self._janitor = Janitor(scratch, spec.shared_memory)
        key, port = secrets.token_urlsafe(32), free_port()
        life, own = secrets.token_hex(8), process()
        start = 0 if own is None else own.start
        self._record = ServerRecord(f"http://127.0.0.1:{port}", key, life, os.getpid(), start)
        command = [*spec.command, str(folder.root), str(n), str(port)]
        environment = {**os.environ, **spec.environment, spec.key_variable: key, "TMPDIR": scratch}
        environment |= self._janitor.environment
        self._spawn = partial(spawn, command, log=2, environment=environment, session=False)

    def request_stop(self, *_: object) -> None:
        """Handle a signal: stop in order."""
        self._stop_requested = True
        self._status.stop_requested()

    def run(self) -> int:
        """Start the server and watch it until it ends or a stop is requested; return the exit code."""
        self._wait_for_turn()
        if self._stop_requested:
            return 0
        server, ready = self._spawn(), False
        started = answered = time.monotonic()
        beat = asked = 0.0
        while not self._stop_requested:
            if (code := server.poll()) is not None:
                return self._end_as(code)
            self._watch_turn(ready=ready)
            now = time.monotonic()
            if now - beat >= self._beats:
                beat = now
                self._box.beat()
            if now - asked >= (ASK_SECONDS if ready else POLL_SECONDS):
                if self._responds(ready=ready):
                    answered = time.monotonic()
                    if not ready:
                        ready = True
                        self._record.save(self._record_path)
                        self._status.ready()
                elif ready and now - answered > self._spec.silent_seconds:
                    self._status.failed(f"the server has not answered for {self._spec.silent_seconds:g} s")
                    return EXIT_CRASHED
                elif not ready and now - started > self._longest_start:
                    # After a wait for its turn the supervisor's deadline is over.
                    late = f"the server does not generate {self._longest_start:g} s after its start"
                    self._status.failed(f"{late}; see this log, or raise supervision.start_deadline")
                    return EXIT_CRASHED
                asked = time.monotonic()
            time.sleep(POLL_SECONDS)
        self._record_path.unlink(missing_ok=True)
        return 0

    def _wait_for_turn(self) -> None:
        """Wait until the server may start. It may take long: this process is ready before, and its actor waits."""
        if not self._may_start():
            self._status.ready()
        while not (self._may_start() or self._stop_requested):
            self._box.beat()
            time.sleep(POLL_SECONDS)

    def _watch_turn(self, *, ready: bool) -> None:
        """After the turn of a server that is ready, have it leave its device."""
        if not ready:
            return
        had_turn, self._had_turn = self._had_turn, self._may_start()
        if had_turn and not self._had_turn:
            threading.Thread(target=self._leave, name="leaving", daemon=True).start()

    def _leave(self) -> None:
        """Have the server leave the device after its actor's turn, or kill it: a killed actor has not released it."""
        if self._spec.leave is None:
            return
        try:
            with kept_free(self._locks, self._name):
                self._spec.leave(self._record, self._may_start)
        except Exception as error:  # noqa: BLE001 whatever keeps it there
            self._status.failed(f"the server keeps the device after its actor's turn: {error}")
            self._record.kill()

    def _responds(self, *, ready: bool) -> bool:
        if ready:
            return answers(self._record, self._spec.health, self._answer)
        return generates(self._record, self._spec, self._answer)

    def _end_as(self, code: int) -> int:
        """End as the server did, so that the supervisor judges the server's end."""
        self._record_path.unlink(missing_ok=True)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._status.failed(f"the inference server {how}; see this log")
        if code < 0:
            with suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)  # refused for SIGKILL
            os.kill(os.getpid(), -code)
        return EXIT_BLAMELESS


def main() -> None:
    """Run an inference server; the process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        bind_to_cores()
        folder = RunFolder(Path(sys.argv[1]))
        config = folder.load_config()
        spec = inference_backend(config).server(config)
        assert spec is not None  # noqa: S101 the node starts keepers for such backends alone
        number = int(sys.argv[2])
        locks, actor = device_locks(config, "rollout"), f"rollout.{number}"
        takes_turns = config.placement.leaves_device("rollout")
        may_start = partial(is_held_by, locks, actor) if takes_turns else lambda: True
        keeper = InferenceServerProcess(folder, number, spec, may_start, locks if takes_turns else ())
        signal.signal(signal.SIGTERM, keeper.request_stop)
        code = keeper.run()
    except BaseException:  # noqa: BLE001 the process ends here
        traceback.print_exc()
        StatusPipe().failed(traceback.format_exc())
        code = EXIT_CRASHED
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
