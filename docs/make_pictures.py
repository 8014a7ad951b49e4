"""Write docs/live-view.svg and docs/reward.png from a run of the demo: `python docs/make_pictures.py`.

The run takes about five minutes on two cores. The trainer is killed once on the way, so that the picture of the live
view shows a restart.
"""

from __future__ import annotations

import io
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from nats.aio.msg import Msg
from rich.console import Console

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError
from broker.permissions import OBSERVER
from broker.subjects import Subjects
from relax_actors.monitoring.live_view import LiveView
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.progress import Progress
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo" / "demo.toml"
KILLED, SHOWN = 0.59, 0.6
"""Shares of the steps after which the trainer is killed and the picture is taken."""
WIDTH = 100
START_SECONDS, RUN_SECONDS = 120.0, 3600.0


def main(settings: list[str]) -> None:
    """Train the demo with some settings in a temporary folder, and draw its pictures."""
    logs.configure(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "demo")
        command = [sys.executable, "-m", "relax_actors.cli.main"]
        arguments = [str(DEMO), f"run.folder={folder.root}", *settings, "--quiet"]
        run = subprocess.Popen([*command, "up", *arguments])
        try:
            wait(folder.address.exists, START_SECONDS)
            progress = Progress("demo", folder.load_config().run.steps)
            with closing(follow(folder, progress)):
                wait(lambda: progress.step > KILLED * progress.steps, RUN_SECONDS)
                subprocess.run([*command, "chaos", str(folder.root), "--kill", "trainer"], check=True)
                wait(lambda: progress.step > SHOWN * progress.steps and progress.restarts, RUN_SECONDS)
                draw(progress, HERE / "live-view.svg")
            run.wait(RUN_SECONDS)
            shutil.copy(folder.reward_plot, HERE / "reward.png")
        finally:
            run.terminate()
            run.wait()


def follow(folder: RunFolder, progress: Progress) -> Connection:
    """Feed the events and metrics of a run to its live view."""
    found: list[Connection] = []

    def connect() -> bool:
        try:
            address = Address.load(folder.address).for_user(OBSERVER)
            found.append(Connection(address, "pictures"))
        except BrokerError:
            return False
        return True

    wait(connect, START_SECONDS)

    async def subscribe() -> None:
        async def take(message: Msg) -> None:
            if (read := LogMessage.parse(message.subject, message.data)) is not None:
                progress.take(read)

        for subject in Subjects(progress.run).log_subjects():
            await found[0].nc.subscribe(subject, cb=take)

    found[0].call(subscribe(), START_SECONDS)
    return found[0]


def wait(holds: Callable[[], object], seconds: float) -> None:
    """Poll a function until it returns a true value."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            msg = f"the run did not reach the moment of the picture within {seconds:.0f} s"
            raise TimeoutError(msg)
        time.sleep(0.1)


def draw(progress: Progress, path: Path) -> None:
    """Draw the live view as an SVG picture that loads no font from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(LiveView(progress))
    picture = console.export_svg(title="relax up examples/demo/demo.toml", unique_id="live-view")
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main(sys.argv[1:])
