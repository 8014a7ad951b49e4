"""Parts of the SGLang engine that need no server, and the CPU replacement of sglang-kernel."""

from __future__ import annotations

import argparse
import base64
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import ModelFacts, MoeFacts
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols import GenerationRequest, StopStrings
from relax_actors.engines.protocols.server import ServerRecord, answers, free_port, generates
from relax_actors.engines.sglang.backend import SEGMENTS, SglangBackend
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.partial_sample import PartialSample, routed_experts
from relax_actors.engines.sglang.row_streams import SampleLimit
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.server_arguments import CPU_TOKENS, MARGIN, server_arguments
from relax_actors.engines.sglang.weight_loaders import DiskLoader, pickled, to_checkpoint_names
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.errors import ActorError, ConfigError, EngineError, RelaxError
from relax_actors.isolation.janitor import SHARED_MEMORY, Janitor, segments
from relax_actors.isolation.proc import process
from relax_actors.messages import FinishReason
from relax_actors.weights import files as weights
from tests.support.http_servers import serving
from tests.support.sglang_servers import MOE
from tests.support.sglang_servers import config_of as run_with

ROOT = Path(__file__).parents[2]
CPU_PACKAGE = ROOT / "deploy" / "sglang-cpu" / "src"
FACTS = ModelFacts(parameters=10, context_length=128, vocabulary=14, model_type="qwen3")
NAMED = {"3:a": 3, "4:b": 4}


def request(**fields: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"samples": 2, "temperature": 0.9, "top_p": 0.8, "max_tokens": 10}
    settings |= {"stop_ids": frozenset([7])} | fields
    return GenerationRequest(np.array([1, 2], np.int32), 5, **settings)


def chunk(tokens: list[int], done: int, reason: Any = None, spans: list[tuple[str, int, int]] | None = None) -> Any:
    meta: dict[str, Any] = {"completion_tokens": done, "finish_reason": reason}
    meta["output_token_logprobs"] = [[-0.5 * token, token, None] for token in tokens]
    if spans:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"output_ids": tokens, "meta_info": meta}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.booleans())
def test_sample_is_the_same_from_incremental_and_cumulative_messages(parts: list[int], cumulative: bool) -> None:  # noqa: FBT001
    sample = PartialSample(request(max_tokens=20), 0)
    sample.request_started()
    tokens = list(range(10, 10 + sum(parts)))
    done = 0
    for i, length in enumerate(parts):
        done += length
        last = i == len(parts) - 1
        reason = {"type": "length"} if last else None
        spans = [("3:a", 0, 1), ("4:b", 1, done)] if last else None
        sent = tokens[:done] if cumulative else tokens[done - length : done]
        assert sample.add_chunk(chunk(sent, done, reason, spans), 3, NAMED) is last
    found = sample.result()
    assert found.tokens.tolist() == tokens
    assert found.logprobs.tolist() == [-0.5 * token for token in tokens]
    assert found.versions.tolist() == [3] + [4] * (len(tokens) - 1)
    assert found.finish_reason is FinishReason.LENGTH


def test_sample_of_a_broken_request_continues_after_its_tokens() -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    sample.add_chunk(chunk([5, 6], 2), 3, NAMED)
    before = sample.parameters()
    sample.request_broken(keep=True)
    assert sample.prompt == [1, 2, 5, 6]
    assert sample.parameters()["max_new_tokens"] == 8
    assert sample.parameters()["sampling_seed"] == before["sampling_seed"]
    sample.request_started()
    assert sample.add_chunk(chunk([8, 7], 2, {"type": "stop"}, [("4:b", 0, 2)]), 4, NAMED)
    found = sample.result()
    assert (found.tokens.tolist(), found.versions.tolist()) == ([5, 6, 8, 7], [3, 3, 4, 4])
    assert found.finish_reason is FinishReason.STOP


def test_tokens_of_uncertain_version_are_generated_again() -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    sample.add_chunk(chunk([5, 6], 2), 3, NAMED)
    sample.swapped()
    sample.add_chunk(chunk([8, 9], 4), 4, NAMED)
    sample.request_broken(keep=True)
    assert sample.prompt == [1, 2, 5, 6]
    sample.request_broken(keep=False)
    assert sample.prompt == [1, 2]


def stopping(**fields: Any) -> PartialSample:
    """A sample that ends with the tokens 8 and 9."""
    strings = StopStrings(["89"], lambda token: str(token).encode())
    sample = PartialSample(request(stop_strings=strings, **fields), 0)
    sample.request_started()
    return sample


def test_sample_ends_at_the_token_that_completes_a_stop_string() -> None:
    sample = stopping()
    assert not sample.add_chunk(chunk([5, 8], 2), 3, NAMED)
    assert not sample.is_stopped
    assert not sample.add_chunk(chunk([9, 5, 6], 5), 3, NAMED)
    assert sample.is_stopped
    # Tokens sampled before the request is aborted are dropped; its end reports the versions.
    assert not sample.add_chunk(chunk([1], 6), 3, NAMED)
    abort = {"type": "abort", "message": "Aborted"}
    assert sample.add_chunk(chunk([2, 3], 8, abort, [("3:a", 0, 1), ("4:b", 1, 8)]), 3, NAMED)
    found = sample.result()
    assert (found.tokens.tolist(), found.versions.tolist()) == ([5, 8, 9], [3, 4, 4])
    assert found.logprobs.tolist() == [-2.5, -4.0, -4.5]
    assert found.finish_reason is FinishReason.STOP


def test_no_stop_string_begins_in_the_prompt_or_ends_before_min_tokens() -> None:
    strings = StopStrings(["25"], lambda token: str(token).encode())  # the prompt ends with 2
    sample = PartialSample(request(stop_strings=strings, min_tokens=3), 0)
    sample.request_started()
    assert not sample.add_chunk(chunk([5, 2, 5, 2], 4), 3, NAMED)
    assert not sample.is_stopped
    assert sample.add_chunk(chunk([5, 1], 6, {"type": "length"}, [("3:a", 0, 6)]), 3, NAMED)
    assert sample.result().tokens.tolist() == [5, 2, 5, 2, 5]
    assert sample.finish_reason is FinishReason.STOP


def test_stop_string_is_completed_after_a_broken_request() -> None:
    sample = stopping()
    sample.add_chunk(chunk([5, 8], 2), 3, NAMED)
    sample.request_broken(keep=True)
    sample.request_started()
    sample.add_chunk(chunk([9], 1), 3, NAMED)
    assert sample.is_stopped
    sample.request_broken(keep=True)
    assert (sample.finish_reason, sample.result().tokens.tolist()) == (FinishReason.STOP, [5, 8, 9])


def test_sample_that_has_ended_starts_again_with_its_row() -> None:
    sample = stopping()
    assert sample.add_chunk(chunk([5, 8, 9], 3, {"type": "length"}, [("3:a", 0, 3)]), 3, NAMED)
    sample.request_broken(keep=False)
    assert (sample.finish_reason, sample.is_stopped, sample.prompt) == (None, False, [1, 2])


def test_stop_string_with_a_token_of_uncertain_version_is_generated_again() -> None:
    for keep, prompt in ((True, [1, 2, 5, 8]), (False, [1, 2])):
        sample = stopping()
        sample.add_chunk(chunk([5, 8], 2), 3, NAMED)
        sample.swapped()
        sample.add_chunk(chunk([9, 5], 4), 4, NAMED)
        assert sample.is_stopped
        sample.request_broken(keep=keep)
        assert (sample.finish_reason, sample.is_stopped, sample.prompt) == (None, False, prompt)
        sample.request_started()
        sample.add_chunk(chunk([9, 5], 2), 4, NAMED)
        assert sample.is_stopped is keep


def test_experts_of_a_sample_with_a_stop_string_are_cut_like_its_tokens() -> None:
    moe = MoeFacts(layers=1, experts=8, experts_of_token=2, without=[])
    strings = StopStrings(["89"], lambda token: str(token).encode())
    end = chunk([8, 9, 5, 6], 4, {"type": "length"}, [("3:a", 0, 4)])
    reported = np.arange(10, dtype="<i4").reshape(5, 1, 2) % 8
    sample = PartialSample(request(stop_strings=strings), 0, moe)
    sample.request_started()
    end["meta_info"]["routed_experts"] = base64.b64encode(reported.tobytes()).decode()
    assert sample.add_chunk(end, 3, NAMED)
    found = sample.result().routed_experts
    assert found is not None
    np.testing.assert_array_equal(found, reported[:3])
    # Aborted in the queue of the server, which then reports no experts.
    sample = PartialSample(request(stop_strings=strings), 0, moe)
    sample.request_started()
    sample.add_chunk(chunk([8, 9, 5], 3), 3, NAMED)
    assert sample.add_chunk(chunk([5], 3, {"type": "abort"}, [("3:a", 0, 3)]), 3, NAMED)
    found = sample.result().routed_experts
    assert found is not None
    assert (found.shape, found.dtype, set(found.ravel())) == ((3, 1, 2), np.int16, {-1})


def test_experts_get_their_checkpoint_names(tmp_path: Path) -> None:
    model = build(run_with(tmp_path / "run", MOE).model_path, seed=3)
    model.save_pretrained(tmp_path / "saved")
    stored = weights.load([tmp_path / "saved" / "model.safetensors"])
    named = to_checkpoint_names(tensors_of(model))
    assert len([name for name in named if "experts.7." in name]) == 3 * MOE["num_hidden_layers"]
    assert {name: tensor.tolist() for name, tensor in named.items()} == {n: t.tolist() for n, t in stored.items()}
    assert to_checkpoint_names(named).keys() == named.keys()


def test_aborted_request_keeps_its_tokens() -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    assert sample.add_chunk(chunk([5, 6], 2, {"type": "abort", "message": "Aborted"}, [("3:a", 0, 2)]), 3, NAMED)
    assert (sample.finish_reason, sample.prompt) == (None, [1, 2, 5, 6])


@pytest.mark.parametrize(
    ("message", "error", "why"),
    [
        (chunk([5], 1, {"type": "length"}, [("9:z", 0, 1)]), ActorError, "which this actor did not load"),
        (chunk([5], 3), EngineError, "from position 2; 0 were received"),
        (chunk([], 0, {"type": "abort", "status_code": 400, "message": "too long"}), EngineError, "too long"),
    ],
)
def test_invalid_messages_of_a_server_are_errors(message: Any, error: type[RelaxError], why: str) -> None:
    sample = PartialSample(request(), 0)
    sample.request_started()
    with pytest.raises(error, match=why):
        sample.add_chunk(message, 3, NAMED)


def test_samples_have_different_seeds_and_greedy_ones_the_most_likely_token() -> None:
    one, other = (PartialSample(request(), i).parameters() for i in range(2))
    assert one["sampling_seed"] != other["sampling_seed"]
    assert 0 <= one["sampling_seed"] < 2**63
    assert (one["stop_token_ids"], one["ignore_eos"], one["top_p"]) == ([7], False, 0.8)
    with_greedy = request(samples=3, greedy_samples=1)
    assert [PartialSample(with_greedy, i).parameters()["top_p"] < 1e-5 for i in range(3)] == [False, False, True]
    assert PartialSample(request(samples=1, greedy_samples=1), 0).parameters()["top_p"] < 1e-5
    assert PartialSample(request(stop_ids=frozenset()), 0).parameters()["ignore_eos"] is True


@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.booleans(), max_size=200))
def test_limit_of_samples_stays_within_bounds_and_recovers(rows: int, group: int, retractions: list[bool]) -> None:
    most = rows * group
    samples = SampleLimit(most, group)
    for retracted in retractions:
        before = samples.limit
        samples.finished(group, retracted=retracted)
        assert 1 <= samples.limit <= most
        assert not retracted or samples.limit == max(1, before // 2)
    for _ in range(rows * (most + 1)):
        samples.finished(group, retracted=False)
    assert samples.limit == most


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
    half = config_of(trainer={"precision": "bfloat16"})
    assert "--attention-backend" not in server_arguments(half, Path("model"), FACTS, 99, key="k", cuda=True)
    long = ModelFacts(parameters=10, context_length=1 << 15, vocabulary=14, model_type="qwen3")
    arguments = pairs(server_arguments(config_of(), Path("model"), long, 99, key="k", cuda=False))
    assert arguments["--max-total-tokens"] == str(CPU_TOKENS)


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"sglang": {"urls": ["http://a"], "weights": "tensors"}}, "needs servers that the run starts"),
        ({"sglang": {"api_key_file": "key"}}, "is for urls"),
        ({"sglang": {"urls": ["http://a", "http://a/"]}, "replicas": 2}, "more than once"),
    ],
)
def test_invalid_settings_are_refused(rollout: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config_of(rollout={"backend": "sglang", **rollout})


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


def test_views_are_pickled_without_their_buffer() -> None:
    body = torch.arange(1 << 16, dtype=torch.uint8)
    views = {str(i): body[i << 12 : (i + 1) << 12].view(torch.float16) for i in range(16)}
    data = base64.b64decode(pickled(views))
    assert len(data) < 2 * body.nbytes
    found = dict(pickle.load(io.BytesIO(data)))  # noqa: S301 our own
    assert all(torch.equal(found[name].view(torch.int16), view.view(torch.int16)) for name, view in views.items())


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
        lambda: record, DiskLoader(tmp_path / "weights"), SglangSettings(128, rows=1, patience=0.5, stall=5)
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


def test_routed_experts_are_decoded_or_refused() -> None:
    moe = MoeFacts(layers=3, experts=300, experts_of_token=2)
    first = np.random.default_rng(0).integers(0, 299, (9, 3))
    chosen = np.stack([first, first + 1], -1).astype("<i4")
    text = base64.b64encode(chosen.tobytes()).decode()
    found = routed_experts(text, 9, moe)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, chosen)
    mixed = MoeFacts(layers=2, experts=300, experts_of_token=2, without=(1,))
    chosen[:, 1] = 0  # a layer without experts chooses nothing
    encoded = base64.b64encode(chosen.tobytes()).decode()
    np.testing.assert_array_equal(routed_experts(encoded, 9, mixed), chosen[:, [0, 2]])
    for wrong, tokens, why in (
        (text, 8, r"not \[8, 3, 2\]"),
        ("", 9, r"not \[9, 3, 2\]"),
        (base64.b64encode(np.full((9, 3, 2), 5, "<i4").tobytes()).decode(), 9, "chosen twice"),
    ):
        with pytest.raises(EngineError, match=why):
            routed_experts(wrong, tokens, moe)


def test_sample_has_the_experts_of_its_last_request() -> None:
    sample = PartialSample(request(max_tokens=3), 0, MoeFacts(layers=1, experts=4, experts_of_token=2))
    sample.request_started()
    message = chunk([5, 6, 8], 3, {"type": "length"}, [("3:a", 0, 3)])
    chosen = np.array([[[0, 1]], [[2, 3]], [[1, 3]], [[0, 2]]], "<i4")
    message["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    sample.add_chunk(message, 3, NAMED)
    np.testing.assert_array_equal(sample.result().routed_experts, chosen)


def test_experts_of_tokens_from_older_weights_are_missing() -> None:
    sample = PartialSample(request(max_tokens=3), 0, MoeFacts(layers=1, experts=4, experts_of_token=2))
    sample.request_started()
    sample.swapped()
    message = chunk([5, 6, 8], 3, {"type": "length"}, [("3:a", 0, 2), ("4:b", 2, 3)])
    chosen = np.array([[[0, 1]], [[2, 3]], [[1, 3]], [[0, 2]]], "<i4")
    message["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    sample.add_chunk(message, 4, NAMED)
    found = sample.result()
    assert found.versions.tolist() == [3, 3, 4]
    assert found.routed_experts is not None
    # The tokens of version 3 were sampled after the prompt's last token and the first generated one.
    assert found.routed_experts[:, 0].tolist() == [[0, 1], [-1, -1], [-1, -1], [0, 2]]


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
