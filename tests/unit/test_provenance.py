"""Statement about a model: signature, changed files and tensors, foreign keys."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from broker.credentials import OperatorKeys, Signature
from broker.errors import BrokerError
from broker.permissions import Permissions
from broker.server_keys import secret_of
from relax_actors.cli.main import build as build_cli
from relax_actors.errors import ConfigError
from relax_actors.replay.origin import problems_of, read_origin, signers_of
from relax_actors.weights.provenance import dependencies_of
from relax_actors.weights.statement import STATEMENT, envelope, files_of, sha256_of, tensors_of
from relax_actors.weights.statement import pre_authentication_encoding as encoding
from tests.support.models import QWEN3, config_of

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
        (lambda folder: (folder / "link").symlink_to(folder.parent), "link was added: it is a symbolic link"),
        (lambda folder: (folder / "gone").symlink_to("nothing"), "gone was added: it is a symbolic link"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe was added: it is no regular file"),
    ],
)
def test_changed_file_is_named(model: Path, change: Callable[[Path], object], problem: str) -> None:
    change(model)
    assert problems_of(read_origin(model)) == [problem]


def checked(model: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `relax provenance --check`."""
    done = CliRunner().invoke(build_cli(["provenance"]), ["provenance", str(model), "--check", "--json", *options])
    return done.exit_code, json.loads(done.stdout)


def test_signer_that_no_known_key_confirms_is_unknown(model: Path) -> None:
    account = KEYS.account_of("demo", "trainer").public
    code, unknown = checked(model)
    assert (code, unknown["valid"], unknown["problems"]) == (3, None, [])
    assert unknown["signers"] == [{"user": "demo.trainer", "account": account}]
    code, known = checked(model, "--key", account)
    assert (code, known["valid"]) == (0, True)
    code, other = checked(model, "--key", OperatorKeys.new().account_of("demo", "trainer").public)
    assert (code, other["valid"]) == (1, False)


def test_digests_are_those_of_the_files_that_a_run_reads_or_have_a_reason(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-2.jsonl", "test.jsonl", "adapter/weights", "critic/weights"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    sources = {
        "pattern": {"kind": "jsonl", "path": str(tmp_path / "train-*.jsonl")},
        "split": {"kind": "jsonl", "path": str(tmp_path), "split": "test"},
        "gone": {"kind": "jsonl", "path": str(tmp_path / "gone.jsonl")},
    }
    sections: dict[str, Any] = {
        "data": {"kind": "mixture", "function": None, "mixture": sources},
        "lora": {"path": str(tmp_path / "adapter")},
        "critic": {"path": str(tmp_path / "critic")},
        "algorithm": {"name": "ppo"},
    }
    config = config_of(tmp_path / "run", QWEN3, **sections)
    stated = [
        each for each in dependencies_of(config, lambda: None) if each["name"] not in ("code", "package", "model")
    ]
    hashed = [(each["name"], Path(each["uri"]).name) for each in stated if "digest" in each]
    assert hashed == [
        ("critic", "weights"),
        ("adapter", "weights"),
        ("data", "train-1.jsonl"),
        ("data", "train-2.jsonl"),
        ("data", "test.jsonl"),
    ]
    assert stated[2]["digest"] == {"sha256": sha256_of(tmp_path / "train-1.jsonl")}
    (missing,) = [each for each in stated if "digest" not in each]
    assert "has no files" in missing["annotations"]["notHashed"]


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
