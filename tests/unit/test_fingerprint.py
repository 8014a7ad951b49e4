"""`relax fingerprint` says why a path has none; the values are compared in `tests/conformance`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from relax_actors.cli.fingerprint import fingerprint
from relax_actors.engines.torch.stored_weights import fingerprint_of
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.support.messages import assert_says


def test_what_holds_no_full_set_of_weights_is_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as raised:
            fingerprint_of(path)
        return str(raised.value)

    assert_says(refusal(tmp_path), f"{tmp_path} holds no weights", "model*.safetensors")
    delta = tmp_path / "delta"
    weights.save({"a": torch.ones(2)}, delta, "0" * 32)
    assert_says(refusal(delta), f"{delta} holds only the changes", "0" * 32, "a full set")
    (tmp_path / "engine.json").write_text(json.dumps({"engine": "megatron"}))
    assert_says(refusal(tmp_path), f"{tmp_path} is a checkpoint of the engine 'megatron'", "the model folder")


def test_the_command_prints_the_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a": torch.arange(4).float()}
    weights.save(tensors, tmp_path / "model.safetensors")
    parts = [tmp_path / "a.0", tmp_path / "a.1"]
    weights.save({"b": torch.ones(2)}, parts[0])
    weights.save(tensors, parts[1])
    for paths, held in (([tmp_path], tensors), (parts, tensors | {"b": torch.ones(2)})):
        fingerprint(paths)
        assert capsys.readouterr().out.strip() == weights.fingerprint(held)
