"""GPUs of a node's actors: leased before a process starts, kept across its restarts, and locked against other runs."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import structlog

from broker.files import make_private_folder
from relax_actors.config import Config
from relax_actors.devices.binding import lease_environment
from relax_actors.devices.inventory import Gpu, Inventory
from relax_actors.devices.placement import Gpus, Placement, needs_of_actors, place
from relax_actors.errors import ConfigError
from relax_actors.supervision.assignment import Assignment, is_client
from relax_actors.supervision.launch import StartError
from relax_actors.supervision.reporter import split_child_id

POLL_SECONDS = 0.5
log = structlog.get_logger()


def lock_folder() -> Path:
    """Return the folder with a lock file for each GPU that runs of this user hold on this machine."""
    return Path("/tmp") / f"relax-gpus-{os.getuid()}"  # noqa: S108 private, and the same for runs with another TMPDIR


class GpuLeases:
    """GPUs that the actors of a node hold.

    An actor that runs again, after whatever end, gets the GPUs that it had. The lock of a GPU is the kernel's, and ends
    with this process, however it ends.

    Args:
        name: names the holder of the GPUs to other runs.
        node: returns the node, whose roles may change; callable from any thread.
        inventory: its GPUs.
        children: returns the names of the node's present children; what others hold is free again. Callable from any
            thread.
    """

    def __init__(
        self, name: str, node: Callable[[], Assignment], inventory: Inventory, children: Callable[[], Collection[str]]
    ) -> None:
        self._name, self._node, self._inventory, self._children = name, node, inventory, children
        self._by_number = {gpu.number: gpu for gpu in inventory.gpus}
        self._held: dict[str, Gpus] = {}
        self._locks: dict[int, int] = {}
        self._changing = threading.Lock()

    def environment(self, actor: str) -> dict[str, str]:
        """Return the environment variables with which an actor, or its server, starts on its GPUs.

        A node without NVIDIA GPUs sets none. On one with GPUs, an actor without any sees none.

        Raises:
            StartError: there are not enough free GPUs; says who has them.
        """
        if not self._inventory.gpus and not self._inventory.limit:
            return {}
        return lease_environment([self._by_number[n] for n in self._lease(actor)])

    def room(self) -> dict[str, int]:
        """Return for how many further actors of each role GPUs are free, of roles that need some of their own."""
        free = len(self._inventory.gpus) - sum(len(gpus) for gpus in list(self._held.values()))
        alone = {role: need.gpus for role, need in self._node().needs.items() if need.group is None and need.gpus}
        return {role: max(0, free) // gpus for role, gpus in alone.items()} if self._inventory.gpus else {}

    def held(self) -> dict[str, list[int]]:
        """Return the GPUs that each actor holds, by its name, and free those of actors that are gone.

        Callable from any thread. Called regularly: else the GPU of a rollout that was taken away would stay locked
        against other runs until an actor of this node starts.
        """
        with self._changing:
            self._free_unused(self._children())
            return {actor: list(gpus) for actor, gpus in self._held.items()}

    def _lease(self, actor: str) -> Gpus:
        if split_child_id(actor)[0] not in self._node().needs or is_client(actor):
            return ()
        with self._changing:
            return self._lease_alone(actor)

    def _lease_alone(self, actor: str) -> Gpus:
        present = {*self._children(), actor}
        self._free_unused(present)
        try:
            placement, taken = self._place(present, actor)
            if problem := placement.problems.get(actor):
                # Deaths of one cause count once: a dying process, or another program, may need a while.
                raise StartError(problem, "GPUs in use" if taken else "")
            if actor in placement.on_cpu:
                log.info("no_free_gpu", actor=actor, gpus=str(self._inventory))
            if actor in placement.gpus:
                self._held[actor] = placement.gpus[actor]
        finally:
            self._free_unused(present)
        return self._held.get(actor, ())

    def _free_unused(self, present: Collection[str]) -> None:
        """Free the GPUs that no present actor holds."""
        self._held = {actor: gpus for actor, gpus in self._held.items() if actor in present}
        held = {n for gpus in self._held.values() for n in gpus}
        for n in self._locks.keys() - held:
            os.close(self._locks.pop(n))

    def _place(self, present: Collection[str], actor: str) -> tuple[Placement, dict[int, str]]:
        """Place all present actors, and lock the GPUs of one; also return GPUs that others have, and who."""
        actors = dict[str, list[str]]()
        for one in sorted((one for one in present if not is_client(one)), key=split_child_id):
            actors.setdefault(split_child_id(one)[0], []).append(one)
        needs, taken = needs_of_actors(self._node().needs, actors), dict[int, str]()
        while True:
            placement = place(needs, self._inventory.numbers, self._held, taken)
            if all(self._lock(n, taken) for n in placement.gpus.get(actor, ())):
                return placement, taken

    def _lock(self, number: int, taken: dict[int, str]) -> bool:
        """Lock a GPU; return False, and note who has it in `taken`, if another run or program does."""
        gpu = self._by_number[number]
        if number in self._locks or gpu.is_simulated:
            return True
        lock, why = lock_gpu(gpu, self._name)
        if lock is None:
            taken[number] = why
            return False
        self._locks[number] = lock
        return True


def lock_gpu(gpu: Gpu, name: str) -> tuple[int | None, str]:
    """Lock a GPU against other runs of this user.

    Args:
        gpu: of this machine.
        name: names the holder to others.

    Returns:
        A descriptor that holds the lock while it is open, and an empty text; or None, and who has the GPU.
    """
    folder = lock_folder()
    make_private_folder(folder)
    lock = os.open(folder / gpu.uuid, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"is held by {os.pread(lock, 200, 0).decode(errors='replace')}"
    else:
        if not (users := gpu.users()):
            os.ftruncate(lock, 0)
            os.pwrite(lock, name.encode(), 0)
            return lock, ""
        why = f"is in use by {_processes(users)}"
    os.close(lock)
    return None, why


def taken_gpus(inventory: Inventory) -> dict[int, str]:
    """Return the GPUs that other runs of this user, or other programs, have now, and who."""
    taken = {}
    for gpu in (gpu for gpu in inventory.gpus if not gpu.is_simulated):
        lock, why = lock_gpu(gpu, "a run that starts")
        if lock is None:
            taken[gpu.number] = why
        else:
            os.close(lock)
    return taken


def lacking_gpus(config: Config, node: Assignment, taken: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """Return a line for each actor of a node that lacks GPUs, if others have the GPUs `taken`."""
    inventory = node.gpus.inventory()
    if not inventory.is_complete:
        return ()
    needs = needs_of_actors(node.needs, {role: node.actors(config, role) for role in node.roles})
    return tuple(place(needs, inventory.numbers, taken=taken).problems.values())


def check_gpus(config: Config, node: Assignment, patience: float = 0.0) -> None:
    """Check that a node has the GPUs that its actors need, and that nobody else uses them.

    Args:
        config: configuration of the run.
        node: the node.
        patience: seconds to wait for GPUs in use, e.g. by processes of an earlier start that are ending.

    Raises:
        ConfigError: a line for each actor that lacks some.
    """
    end, is_told = time.monotonic() + patience, False
    while problems := lacking_gpus(config, node, taken := taken_gpus(node.gpus.inventory())):
        if not taken or time.monotonic() > end:
            raise ConfigError(*problems)
        if not is_told:
            log.info("waiting_for_gpus", problems=problems, seconds=patience)
        is_told = True
        time.sleep(POLL_SECONDS)


def _processes(pids: Collection[int]) -> str:
    shown = []
    for pid in list(pids)[:3]:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            name = "not visible here"
        shown.append(f"process {pid} ({name})")
    return ", ".join(shown)
