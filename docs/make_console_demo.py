"""Write the run that `relax console --demo` shows: `make console-demo`. It takes about a minute on two cores.

A short run of the demo is scaled and loses a rollout actor while it trains, so that every view has something to show.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from waiting import wait

from broker.connection import Connection
from broker.server import Server
from broker.server_keys import Users
from broker.subjects import Subjects
from relax_actors.console.recording import ARCHIVE, NAME, STREAMS, streams_of
from relax_actors.runtime.run_folder import RunFolder

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
STEPS = 120
SETTINGS = (
    f"run.steps={STEPS}",
    "rollout.replicas=2",
    "trainer.prompts_per_step=11",
    "trainer.warmup_steps=10",
    "trainer.learning_rate=6e-4",
    "trainer.checkpoint_every=40",
    "eval.every=20",
    "eval.rows=48",
    "record.every=20",
)
RELAX = (sys.executable, "-m", "relax_actors.cli.main")
MAX_BYTES = 1 << 20


def main() -> None:
    """Train the demo in a temporary folder, and pack what the console reads.

    Raises:
        SystemExit: the archive is larger than it may be.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / NAME)
        command = [*RELAX, "up", str(DEMO), f"run.folder={folder.root}", "--quiet", "--no-console", *SETTINGS]
        with subprocess.Popen(command) as run:
            disturb(folder)
            if run.wait():
                sys.exit("the run failed")
        keep_log(folder)
        pack(folder, ARCHIVE)
    if ARCHIVE.stat().st_size > MAX_BYTES:
        sys.exit(f"{ARCHIVE} has {ARCHIVE.stat().st_size} bytes, more than {MAX_BYTES}: record fewer steps")


def disturb(folder: RunFolder) -> None:
    """Scale the run at a third of its steps, and kill a rollout actor at two thirds."""
    wait(lambda: status(folder).get("step", 0) > STEPS // 3)
    subprocess.run([*RELAX, "scale", str(folder.root), "rollout=3"], check=True)
    wait(lambda: status(folder)["step"] > 2 * STEPS // 3)
    tree = subprocess.check_output([*RELAX, "tree", str(folder.root)], text=True)
    process = re.search(r" rollout\.0 .*pid (\d+)", tree)
    assert process, tree  # noqa: S101
    os.kill(int(process[1]), signal.SIGKILL)


def status(folder: RunFolder) -> dict[str, Any]:
    """Return what `relax status` tells; empty while the run cannot be read."""
    done = subprocess.run(
        [*RELAX, "status", str(folder.root), "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    body: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return body


def keep_log(folder: RunFolder) -> None:
    """Have the broker keep the log of a run that is over for ever, instead of a week."""
    name = folder.load_settings().run.name
    server = Server(folder.broker, users=Users.operator(name))
    try:
        with closing(Connection(server.start(), "recording")) as connection:

            async def update() -> None:
                stream = (await connection.js.stream_info(Subjects(name).log_stream)).config
                stream.max_age = 0
                await connection.js.update_stream(stream)

            connection.call(update(), 30)
    finally:
        server.stop()


def pack(folder: RunFolder, archive: Path) -> None:
    """Write the archive that `recording.unpack` reads; it holds no path of this machine, and no keys."""
    body = json.loads(folder.config.read_text())
    body["import_path"], body["config"]["run"]["folder"] = "", NAME
    config = json.dumps(body).encode()
    root, subjects = streams_of(folder), Subjects(folder.load_settings().run.name)
    with tarfile.open(archive, "w:xz", preset=9) as file:
        head = tarfile.TarInfo(folder.config.name)
        head.size = len(config)
        file.addfile(head, io.BytesIO(config))
        parts = {name: folder.root / name for name in ("record", "evaluations", "summary.json", "model-config")}
        parts |= {f"{STREAMS}/{name}": root / name for name in (subjects.table_stream, subjects.log_stream)}
        for name, path in parts.items():
            file.add(path, name, filter=plain)


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out locks, and who owns a file."""
    if entry.name.endswith("/lock"):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
