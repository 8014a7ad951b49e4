"""Actors that are killed while they make or hold weights of their node: the others go on, and nothing is left."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relax_actors.isolation.proc import processes
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.node_sets import FILE, MEMORY, NodeSets
from tests.support.running import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VERSIONS, KILLS = 6, 30
NURSERY = """
import os, signal, sys
from pathlib import Path

from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.node_sets import FILE, NodeSets
from relax_actors.weights.protocols import WeightUpdate

folder, in_memory = Path(sys.argv[1]), sys.argv[2] == "memory"
updates = [WeightUpdate(n, p, [folder / str(n)]) for n, p in enumerate(sys.argv[3:])]

def say(*words):
    os.write(1, (" ".join(map(str, (os.getpid(), *words))) + "\\n").encode())

def follow():
    copy = HostCopy(NodeSets(folder / "room", in_memory=in_memory))
    while True:
        for update in updates:
            copy.apply([update])
            assert weights.fingerprint(dict(copy.tensors)) == update.fingerprint
            status = (copy.tensors.folder / FILE).stat()
            say(update.version, status.st_ino)

def stop():
    def source():
        say("stops")
        signal.pause()
    NodeSets(folder / "room", in_memory=in_memory).hold(0, updates[0].fingerprint, source)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        try:
            {"follow": follow, "stop": stop}[line.strip()]()
        except BaseException as error:
            say("failed", repr(error))
        os._exit(1)
"""


class Nursery:
    """Forks actors of a node from a process that has imported torch; `lines` are what they say."""

    def __init__(self, folder: Path, kind: str) -> None:
        prints = list(published(folder))
        command = [sys.executable, "-c", NURSERY, str(folder), kind, *prints]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._rest = b""
        self.inodes: set[int] = set()

    def start(self, work: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{work}\n".encode())
        self._process.stdin.flush()

    def line(self) -> list[str]:
        """Return the words of the next line."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            assert select.select([self._process.stdout], [], [], 60)[0], "the actors do nothing for 60 s"
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the nursery has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        words = line.decode().split()
        assert words[0].isdigit(), line  # a warning
        assert words[1] != "failed", words
        self.inodes |= {int(inode) for inode in words[2:]}
        return words

    def following(self, count: int) -> set[int]:
        """Wait until `count` actors have come to each version again; return their ids."""
        seen: dict[int, set[str]] = {}
        while sum(len(versions) == VERSIONS for versions in seen.values()) < count:
            pid, version, _ = self.line()
            seen.setdefault(int(pid), set()).add(version)
        return {pid for pid, versions in seen.items() if len(versions) == VERSIONS}

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def published(folder: Path) -> Iterator[str]:
    """Write a full set and deltas to it, of 6 MiB each; yield their fingerprints."""
    before = {"a": torch.randn(1 << 20, dtype=torch.float32), "b": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    weights.save(before, folder / "0")
    yield weights.fingerprint(before)
    for version in range(1, VERSIONS):
        after = before | {"b": before["b"] + torch.randint(0, 2, (1 << 20,)).bfloat16()}
        weights.save(deltas.encode(before, after), folder / str(version), weights.fingerprint(before))
        yield weights.fingerprint(after)
        before = after


@pytest.fixture(params=["memory", "disk"])
def nursery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path, request.param)
    yield nursery
    nursery.close()


def test_actors_killed_at_random_leave_whole_sets_or_nothing(nursery: Nursery, tmp_path: Path) -> None:
    random_source, dead = random.Random(1), set[int]()
    for _ in range(3):
        nursery.start("follow")
    alive = nursery.following(3)
    for _ in range(KILLS):
        time.sleep(random_source.uniform(0, 0.05))  # the instant of the kill is what varies
        os.kill(killed := random_source.choice(sorted(alive)), signal.SIGKILL)
        nursery.start("follow")
        dead.add(killed)
        alive -= dead
        while len(alive) < 3:
            pid = int(nursery.line()[0])
            alive |= {pid} - dead  # what a dead actor said may come late
    alive = nursery.following(3)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive & processes().keys(), "end of the actors")
    assert not holders(nursery.inodes)
    NodeSets(tmp_path / "room").close()
    assert [path.name for path in (tmp_path / "room").iterdir()] == ["making"]


def holders(inodes: set[int]) -> list[str]:
    """Lines of `/proc/*/maps` with memory of weights that actors have reported."""
    lines: list[str] = []
    for pid in processes():
        try:
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        lines += [line for line in mapped if MEMORY in line and int(line.split()[4]) in inodes]
    return lines


def test_whoever_waits_makes_the_set_once_its_maker_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    nursery.start("stop")
    maker, what = nursery.line()
    assert what == "stops"
    nursery.start("follow")
    lock = tmp_path / "room" / "making"
    wait_until(lambda: len(list((tmp_path / "room").glob("*.lock"))) == 2, "second actor")
    assert maker in lock.read_text()
    assert not list((tmp_path / "room").glob(f"*/*/{FILE}"))
    os.kill(int(maker), signal.SIGKILL)
    (waited,) = nursery.following(1)
    wait_until(lambda: len(list((tmp_path / "room").glob("*.lock"))) == 1, "removal of the maker's folder")
    os.kill(waited, signal.SIGKILL)
