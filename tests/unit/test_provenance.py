"""Statement about a model: signature, changed files and tensors, foreign keys."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from broker.credentials import OperatorKeys, Signature
from broker.errors import BrokerError
from broker.permissions import Permissions
from broker.server_keys import secret_of
from relax_actors.errors import ConfigError
from relax_actors.replay.origin import problems_of, read_origin, signers_of
from relax_actors.weights.statement import STATEMENT, envelope, files_of, sha256_of, tensors_of
from relax_actors.weights.statement import pre_authentication_encoding as encoding

KEYS = OperatorKeys.new()


def credentials(folder: Path, keys: OperatorKeys = KEYS) -> Path:
    account = keys.account_of("demo", "trainer")
    path = folder / "nats.creds"
    path.write_text(keys.credentials("demo.trainer", Permissions((), ()), account))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {"embed.weight": torch.arange(6.0), "head.weight": torch.ones(2, 3)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    files = {str(path.relative_to(folder)): path for path in files_of(folder)}
    products = [{"name": "tensors", "content": {"model.safetensors": tensors_of(files["model.safetensors"])}}]
    statement = {
        "subject": [{"name": name, "digest": {"sha256": sha256_of(path)}} for name, path in files.items()],
        "predicate": {
            "buildDefinition": {"resolvedDependencies": []},
            "runDetails": {"metadata": {"invocationId": "demo"}, "byproducts": products},
        },
    }
    payload = json.dumps(statement).encode()
    signed = Signature.of(encoding(payload), credentials(tmp_path))
    signatures = [{"sig": signed.signature, "claims": signed.claims}]
    (folder / STATEMENT).write_text(envelope(payload, signatures))
    return folder


def test_pre_authentication_encoding_is_that_of_the_standard() -> None:
    # Of DSSE 1.0, with its example of a payload.
    assert encoding(b"hello world") == b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"


def test_untouched_model_has_no_problems_and_names_its_signer(model: Path) -> None:
    origin = read_origin(model)
    account = KEYS.account_of("demo", "trainer").public
    assert (problems_of(origin), signers_of(origin)) == ([], [("demo.trainer", account)])
    assert problems_of(origin, account) == []
    assert read_origin(model.parent).folder == model


def test_account_of_the_run_is_looked_up_beside_the_model(model: Path) -> None:
    path = secret_of(model.parent / "broker" / "keys")
    path.parent.mkdir(parents=True)
    KEYS.save(path)
    assert problems_of(read_origin(model)) == []
    OperatorKeys.new().save(path)
    (problem,) = problems_of(read_origin(model))
    assert "is signed by account A" in problem


def change_head(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_head, "file model.safetensors was changed: head.weight"),
        (lambda folder: (folder / "config.json").write_text("{ }"), "file config.json was changed"),
        (lambda folder: (folder / "config.json").unlink(), "file config.json is missing"),
        (lambda folder: (folder / "extra.py").write_text(""), "file extra.py was added"),
    ],
)
def test_changed_file_is_named(model: Path, change: Callable[[Path], object], problem: str) -> None:
    change(model)
    assert problems_of(read_origin(model)) == [problem]


def test_changed_statement_does_not_match_its_signature(model: Path) -> None:
    body = json.loads((model / STATEMENT).read_text())
    payload = base64.b64decode(body["payload"]).replace(b'"demo"', b'"dema"')
    (model / STATEMENT).write_text(envelope(payload, body["signatures"]))
    (problem,) = problems_of(read_origin(model))
    assert "was changed after it was signed" in problem
    (model / STATEMENT).write_text(envelope(base64.b64decode(body["payload"]), []))
    (problem,) = problems_of(read_origin(model))
    assert "is not signed" in problem


def test_claims_of_another_user_are_refused(tmp_path: Path) -> None:
    own = Signature.of(b"x", credentials(tmp_path))
    other = Signature.of(b"x", credentials(tmp_path, OperatorKeys.new()))
    assert own.verify(b"x")[0] == "demo.trainer"
    for wrong in (Signature(other.claims, own.signature), Signature(own.claims[:-4] + "AAAA", own.signature)):
        with pytest.raises(BrokerError, match="does not match"):
            wrong.verify(b"x")
    with pytest.raises(BrokerError, match="cannot be read"):
        Signature("a.b", own.signature).verify(b"x")


def test_folder_without_a_statement_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no provenance\.json: give the model folder"):
        read_origin(tmp_path)
    (tmp_path / STATEMENT).write_text('{"payload": 3}')
    with pytest.raises(ConfigError, match="is no statement about a model"):
        read_origin(tmp_path)
