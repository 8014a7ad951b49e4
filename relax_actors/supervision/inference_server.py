"""Keeps an inference server for one actor of the rollout: a child of the node beside the actor, so that neither's death
is the other's.

The node's supervisor starts it as `python -m relax_actors.supervision.inference_server RUN_FOLDER NUMBER`. It leads the
group that the server's processes are in, tells where the server is once it generates, and ends as the server ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from broker.process import spawn
from relax_actors.engines.sglang import launch
from relax_actors.engines.sglang.server_record import ServerRecord, process_start_ticks
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.exit_codes import EXIT_BLAMELESS, EXIT_CRASHED
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision import janitor
from relax_actors.supervision.outcome import Status

LOOK_SECONDS, ASK_SECONDS = 0.25, 5.0
SILENT_SECONDS = 60.0
"""A server whose first process does not answer for so long is ended."""


class Keeper:
    """One life of a server.

    Args:
        folder: the run's.
        n: number of the actor that it is for.
    """

    def __init__(self, folder: RunFolder, n: int) -> None:
        self._status = Status()
        self._box = BlackBox(folder.box(f"server.{n}"))
        self._record_path = folder.server(n)
        self._record_path.unlink(missing_ok=True)
        heartbeat = folder.load_config().supervision.heartbeat
        self._beats, self._answer = min(1.0, heartbeat / 4), heartbeat / 2
        self._told = False
        # What SGLang leaves behind when it is killed: names of its sockets.
        scratch = tempfile.mkdtemp(prefix="relax-sglang-")
        self._clean_up_after_us(scratch)
        key, port = secrets.token_urlsafe(32), free_port()
        life, pid = secrets.token_hex(8), os.getpid()
        self._record = ServerRecord(f"http://127.0.0.1:{port}", key, life, pid, process_start_ticks(pid) or 0)
        command = [sys.executable, "-m", launch.__name__, str(folder.root), str(n), str(port)]
        environment = os.environ | {launch.KEY_VARIABLE: key, "TMPDIR": scratch, "GLOO_SOCKET_IFNAME": "lo"}
        self._server = spawn(command, log=2, environment=environment, session=False)

    def _clean_up_after_us(self, scratch: str) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-I", "-S", janitor.__file__, str(read), str(os.getpid()), scratch]
        subprocess.Popen(command, pass_fds=(read,), stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
        os.close(read)
        self._alive = write  # closed by the kernel when this process ends

    def tell_to_end(self, *_: object) -> None:
        """End it in order; a signal's handler."""
        self._told = True
        self._status.told()

    def run(self) -> int:
        """Keep it until it ends, or until told to end; gives the exit code."""
        ready, answered = False, time.monotonic()
        beat = asked = 0.0
        while not self._told:
            if (code := self._server.poll()) is not None:
                return self._end_as(code)
            now = time.monotonic()
            if now - beat >= self._beats:
                beat = now
                self._box.beat()
            if now - asked >= (ASK_SECONDS if ready else LOOK_SECONDS):
                if (answers if ready else generates)(self._record, self._answer):
                    answered = time.monotonic()
                    if not ready:
                        ready = True
                        self._record.save(self._record_path)
                        self._status.ready()
                elif ready and now - answered > SILENT_SECONDS:
                    self._status.failed(f"the server does not answer for {SILENT_SECONDS:g} s")
                    return EXIT_CRASHED
                asked = time.monotonic()
            time.sleep(LOOK_SECONDS)
        self._record_path.unlink(missing_ok=True)
        return 0

    def _end_as(self, code: int) -> int:
        """End as the server did, so that the supervisor judges it by that."""
        self._record_path.unlink(missing_ok=True)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._status.failed(f"the inference server {how}; see this log")
        if code < 0:
            with suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)  # refused for SIGKILL
            os.kill(os.getpid(), -code)
        return EXIT_BLAMELESS


def generates(record: ServerRecord, seconds: float) -> bool:
    """Whether the server of a record can be used. Health is told to everybody, so another server at the port would be
    taken for it; what is served is not.
    """
    return answers(record, seconds, "/health_generate") and answers(record, seconds)


def answers(record: ServerRecord, seconds: float, path: str = "/model_info") -> bool:
    """Whether a server says at a path that all is well; without the proxies that the environment names."""
    request = urllib.request.Request(  # noqa: S310 our own server's
        record.url + path, headers={"Authorization": f"Bearer {record.key}"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), direct.open(request, timeout=seconds) as answer:
        return bool(answer.status == 200)  # noqa: PLR2004
    return False


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Entry point of the keeper's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        keeper = Keeper(RunFolder(Path(sys.argv[1])), int(sys.argv[2]))
        signal.signal(signal.SIGTERM, keeper.tell_to_end)
        code = keeper.run()
    except BaseException:  # noqa: BLE001 the process ends here
        traceback.print_exc()
        Status().failed(traceback.format_exc())
        code = EXIT_CRASHED
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
