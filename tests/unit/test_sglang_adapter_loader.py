"""What a server gets of an adapter: the base first, then tensors by PEFT's names, zeros where SGLang joins layers."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from relax_actors.data.adapter import form_of
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.adapter_loader import AdapterLoader
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.weight_loaders import StagedWeights
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import ConfigError, StoreError
from relax_actors.weights import files as weights
from tests.conformance.base.training_engine import begun
from tests.support.adapters import adapter_config, base_folder
from tests.support.http_servers import serving

FEW = {"rank": 4, "rslora": True, "alpha": 6.0, "targets": ["v_proj", "model.layers.1.mlp.up_proj"]}


class RecordingServer(BaseHTTPRequestHandler):
    """Keeps what it is sent, and says that it has loaded it."""

    requests: ClassVar[list[tuple[str, Any]]] = []
    identity: ClassVar[str] = "default"
    read: ClassVar[str] = ""
    """Fingerprint of the weights that it read last."""

    def do_GET(self) -> None:
        self._answer({"weight_version": type(self).identity, "data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).requests.append((self.path, body))
        if "model_path" in body:
            type(self).read = weights.fingerprint_of_files(sorted(Path(body["model_path"]).glob("*.safetensors")))
        type(self).identity = body.get("weight_version") or body.get("new_version") or type(self).identity
        self._answer({})

    def _answer(self, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(params=[True, False], ids=["own server", "another server"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    RecordingServer.requests, RecordingServer.identity, RecordingServer.read = [], "default", ""
    with serving(RecordingServer) as url:
        server = Server(ServerRecord(url, "key", "ab", process_group=1 if request.param else 0))
        yield server
        server.close()


def tensors_in(payload: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = pickle.loads(base64.b64decode(payload))  # noqa: S301 pickled by this test's loader
    return found


def test_server_gets_the_base_once_and_each_version_as_an_adapter(tmp_path: Path, server: Server) -> None:
    base = base_folder(tmp_path)
    config = adapter_config(tmp_path / "run", base, FEW)
    assert config.lora is not None
    loader, path = AdapterLoader(base, form_of(config.lora), tmp_path / "shared", ranks=2), tmp_path / "0"
    fingerprint = begun(TorchEngine(config)).publish(path)
    published = weights.load([path])
    for version in (0, 1):
        staged = StagedWeights(version, fingerprint)
        loader.stage(staged, published)
        loader.load(server, staged)
    paths = [path for path, _ in RecordingServer.requests]
    load = "/load_lora_adapter_from_tensors"
    assert paths == ["/update_weight_version", "/update_weights_from_disk", load, load]
    # The folder of another server's machine may hold other weights by the same path.
    assert RecordingServer.requests[1][1]["model_path"] == str(base if server.record.is_own else tmp_path / "shared")
    assert f"base:{RecordingServer.read}" == loader.base
    assert not (tmp_path / "shared").exists()
    assert RecordingServer.identity == loader.base
    body = RecordingServer.requests[2][1]
    assert body["lora_name"] == f"0:{fingerprint}"
    # SGLang divides alpha by the rank: 12 / 4 = 6 / sqrt(4).
    assert (body["config_dict"]["r"], body["config_dict"]["lora_alpha"]) == (4, 12.0)
    assert body["config_dict"]["target_modules"] == ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    assert len(body["serialized_named_tensors"]) == 2
    sent = tensors_in(body["serialized_named_tensors"][1])
    prefix = "base_model.model.model.layers.1."
    torch.testing.assert_close(
        sent[f"{prefix}self_attn.v_proj.lora_A.weight"], published["model.layers.1.self_attn.v_proj.lora_A.weight"]
    )
    assert not sent[f"{prefix}self_attn.q_proj.lora_A.weight"].any()
    assert sent[f"{prefix}mlp.gate_proj.lora_B.weight"].shape == (64, 4)
    assert "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight" not in sent
    assert body["expected_checksums"] == {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in sent.items()
    }


def test_base_that_changed_and_adapter_of_another_base_are_not_served(tmp_path: Path, server: Server) -> None:
    base = base_folder(tmp_path)
    config = adapter_config(tmp_path / "run", base)
    assert config.lora is not None
    form, path = form_of(config.lora), tmp_path / "0.safetensors"
    staged = StagedWeights(0, begun(TorchEngine(config)).publish(path))
    loader = AdapterLoader(base, form, tmp_path / "shared")
    other = AdapterLoader(base_folder(tmp_path / "other", seed=8), form, tmp_path / "shared")
    with pytest.raises(ConfigError, match="version 0 belongs to the base with fingerprint"):
        other.stage(staged, weights.load([path]))
    loader.stage(staged, weights.load([path]))
    stored = weights.load([base / "model.safetensors"])
    weights.save({name: tensor + 1 for name, tensor in stored.items()}, base / "model.safetensors")
    with pytest.raises(StoreError, match="not those of the base"):
        loader.load(server, staged)
    assert RecordingServer.requests == []
