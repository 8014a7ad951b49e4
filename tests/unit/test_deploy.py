"""The files in deploy/ agree with the code; tests/e2e/compose has the tests that need a Docker engine."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from broker.listeners import ROUTE_PORT, Settings
from broker.server import find_binary
from relax_actors.cli.keys import make_keys
from relax_actors.registry.catalog import ROLES
from tests.support.guarded import free_port
from tests.support.running import TINY, relax, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DEMO = str(ROOT / "examples" / "demo" / "demo.toml")
SERVERS = ("nats-0.nats", "nats-1.nats", "nats-2.nats")


def test_nats_server_accepts_every_configuration_of_a_cluster(tmp_path: Path) -> None:
    make_keys(
        DEMO,
        tmp_path,
        [],
        Settings(tls=True, mutual=True, websocket=8443, http=8222, cluster=SERVERS, origins=("https://a.example:1",)),
    )
    for name in ("nats-server", *SERVERS):
        command = [str(find_binary()), "-t", "-c", str(tmp_path / "server" / f"{name}.conf")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tls", [False, True])
def test_cluster_routes_use_tls_exactly_if_configured(tmp_path: Path, *, tls: bool) -> None:
    client, route = free_port(), free_port()
    settings = Settings(tls=tls, cluster=("localhost", "elsewhere.invalid"), listen=f"127.0.0.1:{client}")
    make_keys(DEMO, tmp_path, [], settings)
    path = tmp_path / "server" / "localhost.conf"
    path.write_text(path.read_text().replace(f"127.0.0.1:{ROUTE_PORT}", f"127.0.0.1:{route}"))
    context = None
    if tls:
        own = tmp_path / "server"
        context = ssl.create_default_context(cafile=own / "ca.pem")
        context.load_cert_chain(own / "cert.pem", own / "key.pem")
    server = subprocess.Popen([str(find_binary()), "-c", str(path)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: sends_info(route, context), "INFO line")
        assert sends_info(route, None) is not tls
    finally:
        server.terminate()
        server.wait()


def sends_info(port: int, context: ssl.SSLContext | None) -> bool:
    """Return whether a server sends its INFO line, over TLS if a context is given."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        with connection:
            return connection.makefile("rb").readline().startswith(b"INFO ")
    return False


def test_every_container_knows_all_three_servers() -> None:
    import yaml

    base, more = (
        yaml.safe_load(path.read_text())["services"]
        for path in (ROOT / "docker-compose.yml", DEPLOY / "nats" / "docker-compose.yml")
    )
    three = {f"nats://{name}:4222" for name in ("nats", "nats-2", "nats-3")}
    clients = [name for name, service in base.items() if "nats://nats:4222" in str(service.get("command"))]
    assert len(clients) >= len(ROLES.built_in)
    for name in clients:
        assert set(re.findall(r"nats://[\w-]+:4222", str(more.get(name)))) == three, name
        old, new = (re.sub(r"nats://\S+:4222", "", str(service["command"])) for service in (base[name], more[name]))
        assert old == new, name


def test_compose_has_a_service_for_every_built_in_role() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for role in ROLES.built_in:
        assert f"- keys-{role}:/keys/{role}\n" in text, role
    nodes = re.findall(r"--role, (\w+)", text)
    (with_up,) = re.findall(r"--roles ([\w,]+)", text)
    assert {*nodes, *with_up.split(",")} == {*ROLES.built_in}


def test_kustomization_builds(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    make_keys(DEMO, tmp_path / "kubernetes" / "keys", [], Settings(http=8222, cluster=SERVERS))
    for folder in ("kubernetes", "kubernetes/autoscaling"):
        command = [kubectl, "kustomize", str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "kind: " in done.stdout


def test_manifests_match_the_kubernetes_schemas() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    import yaml

    kinds = []
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            if manifest["kind"] != "Kustomization":
                validator.validate(manifest, validator.latest_version(), strict=True)
                kinds.append(manifest["kind"])
    assert {"StatefulSet", "Deployment", "Job", "Service", "PersistentVolumeClaim"} <= set(kinds)


RANKS = ("trainer.backend=megatron", "trainer.megatron.ranks=12", "trainer.megatron.local_ranks=6")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--nodes", "2x0", "--role", "rollout=2"), ("--nodes", "2x8", *RANKS)])
def test_rendered_manifests_match_their_schemas_and_ask_for_the_gpus_of_the_placement(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    import jsonschema
    import yaml

    done = relax("kubernetes", str(TINY), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain = list(yaml.safe_load_all(done.stdout))
    assert [manifest["kind"] for manifest in plain] == ["Job", "StatefulSet"]
    for manifest in plain:
        validator.validate(manifest, validator.latest_version(), strict=True)
    (jobset,) = yaml.safe_load_all(relax("kubernetes", str(TINY), *options, "--jobset", cwd=tmp_path).stdout)
    jsonschema.validate(jobset, json.loads((ROOT / "tests" / "support" / "jobset.schema.json").read_text()))
    jobs = jobset["spec"]["replicatedJobs"]
    for job in jobs:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}} | job["template"]
        validator.validate(whole, validator.latest_version(), strict=True)
    pods = [manifest["spec"]["template"]["spec"] for manifest in plain]
    assert [job["template"]["spec"]["template"]["spec"]["containers"] for job in jobs] == [
        pod["containers"] for pod in pods
    ]
    limits = [pod["containers"][0]["resources"].get("limits") for pod in pods]
    expected = [{"nvidia.com/gpu": 7}, {"nvidia.com/gpu": 6}] if RANKS[0] in options else [None, None]
    assert limits == expected
    cores = [pod["containers"][0]["resources"]["requests"]["cpu"] for pod in pods]
    assert cores == ([5, 6] if RANKS[0] in options else [5, 2])
    secrets = {source["secret"]["name"] for pod in pods for source in pod["volumes"][2]["projected"]["sources"]}
    assert secrets
    assert all(re.fullmatch(r"[a-z0-9-]+", name) and f"name: {name}," in done.stdout for name in secrets)


@pytest.mark.slow
def test_pods_refuse_folders_on_no_volume_and_long_names(tmp_path: Path) -> None:
    far = relax("kubernetes", str(TINY), f"run.folder={tmp_path}/run", cwd=tmp_path)
    assert far.returncode == 2
    assert "run.folder" in far.stderr
    assert "on no volume" in far.stderr
    long = relax("kubernetes", str(TINY), f"run.name={'n' * 41}", cwd=tmp_path)
    assert long.returncode == 2
    assert "run.name" in long.stderr


def test_dashboard_queries_existing_metrics() -> None:
    board = json.loads((DEPLOY / "grafana" / "relax.json").read_text())
    asked = {
        name for panel in board["panels"] for t in panel["targets"] for name in re.findall(r"relax_\w+", t["expr"])
    }
    code = "".join(path.read_text() for path in (ROOT / "relax_actors").rglob("*.py"))
    for name in asked:
        measured = name.removeprefix("relax_step_").removeprefix("relax_actor_")
        assert f'"{measured}"' in code or name == "relax_events_total", name
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
