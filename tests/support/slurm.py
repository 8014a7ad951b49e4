"""A Slurm cluster of two nodes on this machine: a controller and two node daemons, as processes of the test."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from relax_actors.isolation import proc
from tests.support.guarded import free_port
from tests.support.running import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
NODES = ("n1", "n2")
DEAD_SECONDS = 10
"""Silence of a node daemon after which the controller counts its node as dead."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=100
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdTimeout={dead}
KillWait=10
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_missing = [name for name in PROGRAMS if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(
    bool(_missing) or os.getuid() != 0,
    reason=f"needs {', '.join(_missing)} (apt install slurm-wlm)" if _missing else "Slurm's daemons need root",
)


class SlurmCluster:
    """Slurm with two nodes; `stop` ends its daemons.

    Args:
        folder: folder for its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o700)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        ports = {name: free_port() for name in ("controller", "first", "second")}
        text = CONFIGURATION.format(folder=folder, host=socket.gethostname(), dead=DEAD_SECONDS, **ports)
        (folder / "slurm.conf").write_text(text)

    def start(self) -> None:
        """Start the daemons; return when both nodes are idle."""
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self._folder / file}" for name, file in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options])
        wait_until((self._folder / "munge.sock").exists, "munge's socket")
        self._spawn("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == "idle 2", "two idle nodes", 60)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._spawn(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as a power cut would: its daemon, and the job steps that run there."""
        daemon = self._daemons.pop(node)
        table = proc.processes()
        tasks = {pid for pid in table if f"SLURMD_NODENAME={node}".encode() in proc.environment(pid)}
        steps = {table[pid].parent for pid in tasks} - tasks
        for pid in {daemon.pid, *steps, *tasks}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        """Return the output of a command of Slurm's."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    def is_job(self, job: str, state: str) -> bool:
        """Whether a job is in a state, such as "JobState=PENDING"."""
        return state in self.ask("scontrol", "--oneliner", "show", "job", job).split()

    def stop(self) -> None:
        """End the daemons."""
        for process in reversed(self._daemons.values()):
            process.terminate()
        for process in self._daemons.values():
            process.wait(30)

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
