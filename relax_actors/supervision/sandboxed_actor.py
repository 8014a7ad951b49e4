"""First process in a sandbox: passes a listening socket to the keeper outside, then runs the actor.

Started as `python -P -m relax_actors.supervision.sandboxed_actor <descriptor> <run folder> <role> <n>`.
"""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path

from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision import actor_process
from relax_actors.supervision.sandbox import PORT, max_processes


def main() -> None:
    """Open the broker's port of this sandbox, and become the actor."""
    with (
        socket.socket(fileno=int(sys.argv[1])) as keeper,
        socket.create_server(("127.0.0.1", PORT), backlog=16) as listener,
    ):
        socket.send_fds(keeper, [b"\0"], [listener.fileno()])
    folder, role = RunFolder(Path(sys.argv[2])), sys.argv[3]
    if (processes := max_processes(folder.load_config(), role)) is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    actor_process.main(sys.argv[2:])


if __name__ == "__main__":
    main()
