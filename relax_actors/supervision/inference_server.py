"""Process that runs an inference server for one rollout actor, as a separate child of the node.

The actor and the server survive each other's death. The node's supervisor starts this process as
`python -m relax_actors.supervision.inference_server RUN_FOLDER NUMBER`. It leads the process group of the server,
publishes the server's address once it generates, and ends when the server ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
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
from relax_actors.engines.sglang.server_record import ServerRecord
from relax_actors.isolation.janitor import Janitor
from relax_actors.isolation.proc import process
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.exit_codes import EXIT_BLAMELESS, EXIT_CRASHED
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.outcome import StatusPipe

POLL_SECONDS, ASK_SECONDS = 0.25, 5.0
SILENT_SECONDS = 60.0
"""A server whose HTTP process does not answer for so long is killed."""


class InferenceServerProcess:
    """One incarnation of an inference server.

    Args:
        folder: the folder of the node.
        n: number of the actor that the server is for.
    """

    def __init__(self, folder: RunFolder, n: int) -> None:
        self._status = StatusPipe()
        self._box = BlackBox(folder.black_box(f"server.{n}"))
        self._record_path = folder.server(n)
        self._record_path.unlink(missing_ok=True)
        heartbeat = folder.load_config().supervision.heartbeat
        self._beats, self._answer = min(1.0, heartbeat / 4), heartbeat / 2
        self._stop_requested = False
        # SGLang leaves the names of its sockets behind when it is killed.
        scratch = tempfile.mkdtemp(prefix="relax-sglang-")
        self._janitor = Janitor(scratch)
        key, port = secrets.token_urlsafe(32), free_port()
        life, own = secrets.token_hex(8), process()
        start = 0 if own is None else own.start
        self._record = ServerRecord(f"http://127.0.0.1:{port}", key, life, os.getpid(), start)
        command = [sys.executable, "-m", launch.__name__, str(folder.root), str(n), str(port)]
        own_environment = {launch.KEY_VARIABLE: key, "TMPDIR": scratch, "GLOO_SOCKET_IFNAME": "lo"}
        environment = os.environ | own_environment | self._janitor.environment
        self._server = spawn(command, log=2, environment=environment, session=False)

    def request_stop(self, *_: object) -> None:
        """Handle a signal: stop in order."""
        self._stop_requested = True
        self._status.stop_requested()

    def run(self) -> int:
        """Watch the server until it ends or a stop is requested; return the exit code."""
        ready, answered = False, time.monotonic()
        beat = asked = 0.0
        while not self._stop_requested:
            if (code := self._server.poll()) is not None:
                return self._end_as(code)
            now = time.monotonic()
            if now - beat >= self._beats:
                beat = now
                self._box.beat()
            if now - asked >= (ASK_SECONDS if ready else POLL_SECONDS):
                if (answers if ready else generates)(self._record, self._answer):
                    answered = time.monotonic()
                    if not ready:
                        ready = True
                        self._record.save(self._record_path)
                        self._status.ready()
                elif ready and now - answered > SILENT_SECONDS:
                    self._status.failed(f"the server has not answered for {SILENT_SECONDS:g} s")
                    return EXIT_CRASHED
                asked = time.monotonic()
            time.sleep(POLL_SECONDS)
        self._record_path.unlink(missing_ok=True)
        return 0

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


def generates(record: ServerRecord, seconds: float) -> bool:
    """Whether the server of a record generates. The second request needs the key, which another server at this port
    would refuse; health is answered without it.
    """
    return answers(record, seconds, "/health_generate") and answers(record, seconds)


def answers(record: ServerRecord, seconds: float, path: str = "/model_info") -> bool:
    """Whether the server answers a path with status 200; proxies of the environment are bypassed."""
    request = urllib.request.Request(  # noqa: S310 always http
        record.url + path, headers={"Authorization": f"Bearer {record.key}"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), direct.open(request, timeout=seconds) as answer:
        return bool(answer.status == 200)  # noqa: PLR2004
    return False


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run an inference server; the process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        keeper = InferenceServerProcess(RunFolder(Path(sys.argv[1])), int(sys.argv[2]))
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
