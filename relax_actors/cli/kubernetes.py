"""`relax kubernetes`: manifests that run a configuration on nodes of a Kubernetes cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.cli.options import ConfigPath, MoreRoles, Nodes, Overrides
from relax_actors.printable import printable

if TYPE_CHECKING:
    from relax_actors.checks.cluster import NodeShare
    from relax_actors.cli.planned_nodes import PlannedNodes

BROKER = ",".join(f"nats://nats-{n}.nats:4222" for n in range(3))
RETRIES = 1000
"""Failures of a pod after which Kubernetes gives up: a run resumes after each."""
WORK_FOLDER, RUNS = Path("/tmp/node"), Path("/data/runs")  # noqa: S108 in a container of its own
NAME_LENGTH = 40


def kubernetes(
    config: ConfigPath,
    settings: Overrides = None,
    nodes: Nodes = "1x0",
    role: MoreRoles = None,
    jobset: Annotated[
        bool, typer.Option("--jobset", help="Print one JobSet instead of a Job and StatefulSets.")
    ] = False,
    image: Annotated[str, typer.Option(help="Image of the containers.")] = "relax-actors",
    device: Annotated[str, typer.Option(help="Resource name of a GPU.")] = "nvidia.com/gpu",
) -> None:
    """Print manifests with a pod a node: `relax up` in the first, `relax node` in others.

    They go beside the broker and the volume of deploy/kubernetes. The configuration is checked first; notes and the
    placement go to stderr. Containers read CONFIG in the image, from the folder /data if the path is relative. Exit
    code 2 if the configuration does not fit on the nodes.
    """
    import yaml

    from relax_actors.cli.planned_nodes import plan

    planned = plan(config, settings or [], nodes, role or [])
    pods = Pods(config, settings or [], planned, image, device)
    manifests = [pods.job_set()] if jobset else list(pods.plain())
    for line in pods.secrets():
        typer.echo(f"# {printable(line)}")
    typer.echo(yaml.safe_dump_all(manifests, sort_keys=False, width=120), nl=False)


class Pods:
    """Manifests of a run's nodes; `path` is in the image, `device` a GPU's resource.

    Raises:
        ConfigError: the run's name is too long for a pod, or its folder or store is on no volume.
    """

    def __init__(self, path: Path, overrides: Sequence[str], planned: PlannedNodes, image: str, device: str) -> None:
        from relax_actors.errors import ConfigError

        config = planned.config
        self._path, self._overrides, self._planned = path, [*overrides, "broker.replicas=3"], planned
        self._image, self._device = image, device
        self._name = config.run.name.lower().replace("_", "-")
        self._folder, self._store = RUNS.parent / config.folder, RUNS.parent / config.store_path
        if len(self._name) > NAME_LENGTH:
            msg = f"run.name = {config.run.name!r} is too long for names of pods; take at most {NAME_LENGTH} characters"
            raise ConfigError(msg)
        for key, folder in (("run.folder", self._folder), ("store.path", self._store)):
            if not folder.is_relative_to(RUNS) or ".." in folder.parts:
                msg = f"{key} = {str(folder)!r} is on no volume of the pods; take a folder in runs/, or leave it out"
                raise ConfigError(msg)

    def secrets(self) -> Iterator[str]:
        """Yield how to create the credentials, and what kustomization.yaml needs of them."""
        keys = ["relax", "keys", str(self._path), "deploy/kubernetes/keys", *self._overrides, "--store", "/nats"]
        servers = ",".join(f"nats-{n}.nats" for n in range(3))
        yield shlex.join([*keys, "--listen", "0.0.0.0:4222", "--http", "8222", "--cluster", servers])
        yield "secretGenerator of kustomization.yaml:"
        for user in sorted({user for share in self._planned.shares for user in self.users(share)}):
            yield f"  - {{name: {_secret(user)}, files: [keys/{user}/nats.creds]}}"

    def plain(self) -> Iterator[dict[str, Any]]:
        """Yield a Job that ends with the run, and a StatefulSet for each other node."""
        first, *others = self._planned.shares
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self._pod(first)},
            "spec": self._job(first),
        }
        for share in others:
            name = self._pod(share)
            spec = {"serviceName": name, "replicas": 1, "selector": {"matchLabels": {"app": name}}}
            spec["template"] = self._template(share)
            yield {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": spec}

    def job_set(self) -> dict[str, Any]:
        """Return a JobSet that succeeds when the run has ended."""
        jobs = [
            {"name": f"node-{share.node}", "replicas": 1, "template": {"spec": self._job(share)}}
            for share in self._planned.shares
        ]
        success = {"operator": "All", "targetReplicatedJobs": ["node-0"]}
        spec = {"successPolicy": success, "failurePolicy": {"maxRestarts": 3}, "replicatedJobs": jobs}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": f"relax-{self._name}"},
            "spec": spec,
        }

    def users(self, share: NodeShare) -> list[str]:
        """Return the users whose credentials a node needs."""
        return [*share.actors, "node", *([] if share.node else ["operator"])]

    def _pod(self, share: NodeShare) -> str:
        return f"relax-{self._name}-{share.node}"

    def _job(self, share: NodeShare) -> dict[str, Any]:
        return {
            "backoffLimit": RETRIES,
            "podReplacementPolicy": "Failed",
            "template": self._template(share, restartPolicy="OnFailure"),
        }

    def _template(self, share: NodeShare, **more: str) -> dict[str, Any]:
        spec: dict[str, Any] = {
            **more,
            "terminationGracePeriodSeconds": 120,
            "automountServiceAccountToken": False,
            # Without the policy, each start would make run folders writable by the group, and relax refuses these.
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container(share)],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "keys", "projected": {"defaultMode": 0o440, "sources": self._sources(share)}},
                # NCCL and inference servers share memory; a runtime gives 64 MB unasked.
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
        return {"metadata": {"labels": {"app": self._pod(share)}}, "spec": spec}

    def _sources(self, share: NodeShare) -> list[dict[str, Any]]:
        return [
            {"secret": {"name": _secret(user), "items": [{"key": "nats.creds", "path": f"{user}/nats.creds"}]}}
            for user in self.users(share)
        ]

    def _container(self, share: NodeShare) -> dict[str, Any]:
        lock = (WORK_FOLDER if share.node else self._folder) / "lock"
        alive = f'find {shlex.quote(str(lock))} -newermt "-60 seconds" | grep -q .'
        resources: dict[str, Any] = {
            "requests": {"cpu": sum(share.actors.values()), "memory": f"{1 + (share.host_bytes >> 30)}Gi"}
        }
        if share.gpus:
            resources["limits"] = {self._device: share.gpus}
        return {
            "name": "relax",
            "image": self._image,
            "command": self._command(share),
            "livenessProbe": {
                "exec": {"command": ["/bin/sh", "-c", alive]},
                "initialDelaySeconds": 60,
                "periodSeconds": 20,
                "timeoutSeconds": 5,
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "resources": resources,
            "volumeMounts": [
                {"name": "runs", "mountPath": "/data/runs"},
                {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 in a container of its own
                {"name": "keys", "mountPath": "/keys", "readOnly": True},
                {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 as above
            ],
        }

    def _command(self, share: NodeShare) -> list[str]:
        if share.node:
            joins = [f"--broker={BROKER}", "--credentials=/keys", f"--store={self._store}", f"--work={WORK_FOLDER}"]
            words = ["relax", "node", *share.arguments, *joins, f"--name=node-{share.node}", "--stay", "--must-finish"]
        else:
            broker = [f"broker.url={BROKER}", "broker.credentials=/keys"]
            words = ["relax", "up", str(self._path), *self._overrides, *share.arguments, "--quiet", "--must-finish"]
            words += broker
        return [word.replace("$", "$$") for word in words]  # Kubernetes expands $(NAME)


def _secret(user: str) -> str:
    return f"keys-{user.replace('_', '-')}"
