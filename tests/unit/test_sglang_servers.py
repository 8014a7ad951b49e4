"""Servers of the SGLang engine: their arguments, records and processes; and the CPU replacement of sglang-kernel."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_actors.checks.cluster import PlacedActor, node_shares, place_on_nodes
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import ModelFacts
from relax_actors.devices.cluster import simulated_nodes
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols.server import ServerRecord, answers, free_port, generates
from relax_actors.engines.sglang.backend import SEGMENTS, SglangBackend
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.launch import of_frozen_model
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.server_arguments import CPU_TOKENS, MARGIN, server_arguments
from relax_actors.engines.sglang.weight_loaders import FileLoader
from relax_actors.errors import ActorError, ConfigError
from relax_actors.isolation.janitor import SHARED_MEMORY, Janitor, segments
from relax_actors.isolation.proc import process
from tests.support import models
from tests.support.http_servers import serving
from tests.support.models import QWEN3

ROOT = Path(__file__).parents[2]
CPU_PACKAGE = ROOT / "deploy" / "sglang-cpu" / "src"
FACTS = ModelFacts(parameters=10, context_length=128, vocabulary=14, model_type="qwen3")


def config_of(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "/nowhere"},
        "data": {"kind": "python", "function": "nothing"},
        "rollout": {"backend": "sglang", "max_concurrent_prompts": 4, "group_size": 8},
    }
    return validate(tree | {name: tree.get(name, {}) | body for name, body in sections.items()}, "test")


def pairs(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments, [*arguments[1:], ""], strict=True))


def test_a_key_that_begins_with_a_dash_is_not_taken_for_an_option() -> None:
    arguments = server_arguments(config_of(), Path("model"), FACTS, 99, key="-k", cuda=False)
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    assert parser.parse_known_args(arguments)[0].api_key == "-k"


@pytest.mark.parametrize(("device", "first"), [("cuda:3", "3"), ("cuda:0", None), ("cuda", None), ("auto", None)])
def test_a_server_computes_on_the_gpu_that_the_device_names(device: str, first: str | None) -> None:
    config = config_of(rollout=config_of().rollout.model_dump() | {"device": device})
    arguments = pairs(server_arguments(config, Path("model"), FACTS, 99, key="k", cuda=True))
    assert arguments["--device"] == "cuda"
    assert arguments.get("--base-gpu-id") == first
    on_cpu = server_arguments(config, Path("model"), FACTS, 99, key="k", cuda=False)
    assert "--base-gpu-id" not in on_cpu


def test_server_arguments_follow_the_configuration() -> None:
    arguments = pairs(
        server_arguments(config_of(trainer={"precision": "bfloat16"}), Path("model"), FACTS, 99, key="k", cuda=False)
    )
    assert (arguments["--host"], arguments["--port"]) == ("127.0.0.1", "99")
    assert (arguments["--device"], arguments["--attention-backend"], arguments["--dtype"]) == (
        "cpu",
        "torch_native",
        "bfloat16",
    )
    assert (arguments["--load-format"], arguments["--context-length"]) == ("dummy", str(128 + MARGIN))
    assert (arguments["--max-running-requests"], arguments["--max-total-tokens"]) == ("32", str(32 * 128))
    assert "--enable-deterministic-inference" not in arguments
    settings = {"kv_tokens": 1000, "tensor_parallel": 2, "arguments": ["--log-level", "debug"]}
    config = config_of(run={"deterministic": True}, rollout=config_of().rollout.model_dump() | {"sglang": settings})
    arguments = pairs(server_arguments(config, Path("model"), FACTS, 99, key="k", cuda=True))
    assert (arguments["--device"], arguments["--max-total-tokens"], arguments["--tensor-parallel-size"]) == (
        "cuda",
        "1000",
        "2",
    )
    assert (arguments["--log-level"], arguments["--max-running-requests"]) == ("debug", "8")
    assert "--enable-deterministic-inference" in arguments
    assert arguments["--attention-backend"] == "triton"
    few = config_of(rollout={"backend": "sglang", "sglang": {"max_concurrent_samples": 5}})
    arguments = pairs(server_arguments(few, Path("model"), FACTS, 99, key="k", cuda=True))
    assert arguments["--max-running-requests"] == "5"
    half = config_of(trainer={"precision": "bfloat16"})
    assert "--attention-backend" not in server_arguments(half, Path("model"), FACTS, 99, key="k", cuda=True)
    long = ModelFacts(parameters=10, context_length=1 << 15, vocabulary=14, model_type="qwen3")
    arguments = pairs(server_arguments(config_of(), Path("model"), long, 99, key="k", cuda=False))
    assert arguments["--max-total-tokens"] == str(CPU_TOKENS)


@pytest.mark.parametrize(
    ("model_type", "replays", "cuda", "kernels"),
    [
        ("gpt_oss", True, True, "triton"),
        ("gpt_oss", True, False, None),
        ("gpt_oss", False, True, None),
        ("glm4_moe", True, True, None),
    ],
)
def test_experts_of_gpt_oss_are_computed_by_kernels_that_report_them(
    *, model_type: str, replays: bool, cuda: bool, kernels: str | None
) -> None:
    facts, config = replace(FACTS, model_type=model_type), config_of(trainer={"router_replay": replays})
    arguments = pairs(server_arguments(config, Path("model"), facts, 99, key="k", cuda=cuda))
    assert arguments.get("--moe-runner-backend") == kernels


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"sglang": {"urls": ["http://a"], "weights": "shared"}}, "needs servers that the run starts"),
        ({"sglang": {"api_key_file": "key"}}, "is for urls"),
        ({"sglang": {"urls": ["http://a"], "max_concurrent_samples": 9}}, "--max-running-requests"),
        ({"sglang": {"urls": ["http://a", "http://a/"]}, "replicas": 2}, "more than once"),
    ],
)
def test_invalid_settings_are_refused(rollout: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config_of(rollout={"backend": "sglang", **rollout})


def test_places_of_a_server_are_fewer_than_samples_and_those_of_frozen_models_are_their_own(tmp_path: Path) -> None:
    def settings(places: int, **run: bool) -> Config:
        rollout = {"backend": "sglang", "max_concurrent_prompts": 2, "sglang": {"max_concurrent_samples": places}}
        return models.config_of(tmp_path, QWEN3, rollout=rollout, run={"deterministic": False, **run})

    for config, why in (
        (settings(999), "max_concurrent_samples = 999 has no effect"),
        (settings(3, deterministic=True), r"max_concurrent_samples = 3 .*run\.deterministic"),
    ):
        with pytest.raises(ConfigError, match=why):
            list(inference_backend(config).check(config, config.model_path))
    assert of_frozen_model(settings(3), "cpu").rollout.sglang.max_concurrent_samples is None


def test_run_starts_servers_unless_urls_are_set() -> None:
    external = config_of(rollout={"backend": "sglang", "sglang": {"urls": ["http://a"]}})
    for config, starts in (
        (config_of(), True),
        (external, False),
        (config_of(rollout={"backend": "transformers"}), False),
    ):
        assert (inference_backend(config).server(config) is not None) == starts


def test_missing_sglang_error_names_the_install_command() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom relax_actors.engines.sglang import presence\n"
    code += "from relax_actors.errors import ConfigError\ntry: presence.require()\nexcept ConfigError as e: print(e)"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "make sglang" in said


def test_server_record_is_private_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "servers" / "0.json"
    assert ServerRecord.load(path) is None
    record = ServerRecord("http://127.0.0.1:1", "secret", "ab", 12)
    record.save(path)
    assert ServerRecord.load(path) == record
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("way", ["shared", "group"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_weights_that_are_not_in_files_need_memory_of_the_node_once_and_none_of_the_gpus(way: str, device: str) -> None:
    def placed(way: str, replicas: int) -> tuple[PlacedActor, int, int]:
        sglang = {"weights": way, "dtype": "bfloat16"}
        rollout = {"backend": "sglang", "device": device, "sglang": sglang, "replicas": replicas}
        config = config_of(rollout=rollout, trainer={"precision": "bfloat16"})
        placement = place_on_nodes(config, simulated_nodes("1x8x80GiB"), facts)
        first = next(one for one in placement.actors if one.role == "rollout")
        (share,) = node_shares(config, placement)
        return first, placement.shared_bytes[0], share.host_bytes

    facts = replace(FACTS, parameters=10**9)
    (disk, _, one_disk), (memory, of_one, one), (_, of_four, four) = placed("disk", 1), placed(way, 1), placed(way, 4)
    assert bool(memory.gpus) == (device == "cuda")
    assert memory.device_bytes == disk.device_bytes == (2 * 10**9 if device == "cuda" else 0)
    assert of_one == of_four == one - one_disk == 3 * 2 * 10**9  # in use, next, and its successor
    assert four - one == 3 * memory.host_bytes


def test_server_of_thirty_billion_parameters_in_bfloat16_fits_on_a_gpu_of_80_gib() -> None:
    facts = replace(FACTS, parameters=30 * 10**9)
    sglang = {"weights": "shared", "dtype": "bfloat16"}
    rollout = {"backend": "sglang", "device": "cuda", "sglang": sglang}
    config = config_of(rollout=rollout, trainer={"precision": "bfloat16"}, staleness={"max": 0})
    placement = place_on_nodes(config, simulated_nodes("1x8x80GiB"), facts)
    assert not any("rollout" in problem for problem in placement.problems)
    assert [one.device_bytes for one in placement.actors if one.role == "rollout"] == [60 * 10**9]
    assert placement.shared_bytes == (120 * 10**9,)


class AuthorizedServer(BaseHTTPRequestHandler):
    """Answers /health without a key, as SGLang does, and other paths only with the key."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer right"
        self.send_response(200 if known or self.path.startswith("/health") else 401)
        self.end_headers()
        self.wfile.write(b'{"weight_version": "3:a"}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server_url() -> Iterator[str]:
    with serving(AuthorizedServer) as url:
        yield url


def test_own_server_is_not_reached_through_a_proxy(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    record = ServerRecord(server_url, "right", "ab", 12)
    assert answers(record, "/model_info", 5)
    server = Server(record)
    assert server.identity() == "3:a"
    server.close()


def test_process_with_the_reused_pid_of_a_server_is_not_killed() -> None:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["/bin/cat"], start_new_session=True, **pipes) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        state = process(other.pid)
        assert state is not None
        since = state.start
        ServerRecord("http://127.0.0.1:1", "key", "ab", other.pid, since - 1).kill()
        print("alive", file=other.stdin, flush=True)
        assert other.stdout.readline() == "alive\n"
        ServerRecord("http://127.0.0.1:1", "key", "ab", other.pid, since).kill()
        assert other.wait(20) == -9
    assert process(other.pid) is None


def test_unreachable_external_server_is_reported_with_the_reason(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    record = ServerRecord(url, "", "elsewhere")
    engine = SglangEngine(
        lambda: record, FileLoader(tmp_path / "weights"), SglangSettings(128, rows=1, patience=0.5, stall=5)
    )
    with pytest.raises(ActorError, match=f"no inference server is ready within 0.5 s.*{url} does not answer"):
        engine.wait_for_server()
    engine.close()


def test_health_of_another_server_at_the_port_is_not_accepted(server_url: str) -> None:
    spec = SglangBackend().server(config_of())
    assert spec is not None
    assert generates(ServerRecord(server_url, "right", "ab", 12), spec, 5)
    assert answers(ServerRecord(server_url, "wrong", "ab", 12), spec.generates, 5)
    assert not generates(ServerRecord(server_url, "wrong", "ab", 12), spec, 5)


def test_janitor_kills_the_processes_of_a_dead_keeper_and_removes_their_segments(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    segment = Path(tempfile.mkstemp(prefix="sglang_test_", dir=SHARED_MEMORY)[1])
    code = (
        f"file = open({str(segment)!r})\n"
        "import multiprocessing, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(600)\n"
    )
    janitor = Janitor(str(scratch), SEGMENTS)
    command, environment = [sys.executable, "-c", code], os.environ | janitor.environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=environment) as child:
        assert child.stdout is not None
        semaphore = Path(SHARED_MEMORY) / f"sem.{child.stdout.readline().decode().strip()[1:]}"
        assert semaphore.exists()
        assert segments([child.pid], SEGMENTS) == {str(segment), str(semaphore)}
        janitor.close()
        assert child.wait(20) == -9
    assert not any(path.exists() for path in (segment, semaphore, scratch))


def test_cpu_replacement_refuses_import_with_cuda(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class version: cuda = '13.0'\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(CPU_PACKAGE)!r}]\nimport sgl_kernel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError: relax-sglang-cpu replaces sglang-kernel" in done.stderr


def _murmur(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0; the length must be a multiple of four."""

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF

    h = 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        h = rotated(h ^ (rotated(k, 15) * 0x1B873593 & 0xFFFFFFFF), 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_cpu_murmur_hash_equals_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CPU_PACKAGE))
    from relax_sglang_cpu.murmur import murmur_hash32

    seeds, places = [0, 1, 2**63 - 1, 0x123456789ABCDEF], [0, 7, 2**31 - 1, 5]
    found = murmur_hash32(torch.tensor(seeds, dtype=torch.uint64), torch.tensor(places), torch.arange(20))
    assert (found.dtype, found.shape) == (torch.uint32, (4, 20))
    for row, (seed, place) in enumerate(zip(seeds, places, strict=True)):
        for column in range(20):
            data = seed.to_bytes(8, "little") + place.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert int(found[row, column]) == _murmur(data)
