"""Origin of an exported model: read and check the statement beside it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.credentials import OperatorKeys, Signature
from broker.errors import BrokerError
from broker.server_keys import secret_of
from relax_actors.errors import ConfigError
from relax_actors.weights.statement import (
    PAYLOAD_TYPE,
    STATEMENT,
    files_of,
    others_of,
    pre_authentication_encoding,
    sha256_of,
    tensors_of,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Statement about a model.

    Attributes:
        folder: folder of the model.
        statement: the in-toto statement.
        payload: its bytes, which are signed.
        signatures: signatures of the envelope.
    """

    folder: Path
    statement: dict[str, Any]
    payload: bytes
    signatures: list[dict[str, str]]

    @property
    def run(self) -> str:
        """Name of the run that made the model."""
        return str(self.statement["predicate"]["runDetails"]["metadata"]["invocationId"])

    @property
    def dependencies(self) -> list[dict[str, Any]]:
        """Code, packages, model and data."""
        return list(self.statement["predicate"]["buildDefinition"]["resolvedDependencies"])

    def byproduct(self, name: str) -> dict[str, Any]:
        """Return a by-product: `weights` has fingerprints, `tensors` the digests of tensors by file."""
        products = self.statement["predicate"]["runDetails"]["byproducts"]
        return next((dict(product["content"]) for product in products if product["name"] == name), {})


def read_origin(folder: Path) -> Origin:
    """Read the statement beside a model.

    Args:
        folder: folder of the model, or of the run whose model it is.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if not (folder / STATEMENT).is_file() and (folder / "model" / STATEMENT).is_file():
        folder /= "model"
    path = folder / STATEMENT
    if not path.is_file():
        msg = (
            f"{folder} has no {STATEMENT}: give the model folder that a run has exported, such as runs/demo/model; "
            "models of earlier versions have none"
        )
        raise ConfigError(msg)
    try:
        body = json.loads(path.read_text())
        payload = base64.b64decode(body["payload"], validate=True)
        if body["payloadType"] != PAYLOAD_TYPE:
            msg = f"payload type {body['payloadType']!r}"
            raise ValueError(msg)  # noqa: TRY301 reported with the other mistakes of the file
        origin = Origin(folder, json.loads(payload), payload, list(body["signatures"]))
        origin.run, origin.dependencies, origin.byproduct("")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        msg = f"{path} is no statement about a model: {type(error).__name__}: {error}; restore it"
        raise ConfigError(msg) from error
    return origin


def problems_of(origin: Origin, key: str | None = None) -> list[str]:
    """Return what speaks against a model being that of its statement; empty if nothing.

    Args:
        origin: the statement.
        key: public key of the account that must have signed it; by default that of the run's broker if the model lies
            in the run's folder.
    """
    return [*_of_signatures(origin, key), *_of_files(origin)]


def wanted_key(origin: Origin, key: str | None = None) -> str | None:
    """Return the account that must have signed: `key`, or the broker's; or None.

    Any key can sign a statement: without a known account a valid signature says nothing about its author.
    """
    return key or _own_key(origin)


def signers_of(origin: Origin) -> list[tuple[str, str]]:
    """Return each signature's user, and the public key of the vouching account.

    Raises:
        BrokerError: a signature does not match.
    """
    signed = pre_authentication_encoding(origin.payload)
    return [Signature(str(each.get("claims")), str(each.get("sig"))).verify(signed) for each in origin.signatures]


def _of_signatures(origin: Origin, key: str | None) -> list[str]:
    path = origin.folder / STATEMENT
    if not origin.signatures:
        return [f"{path} is not signed: the broker of run {origin.run} has no credentials"]
    try:
        signers = signers_of(origin)
    except BrokerError as error:
        return [f"{path} was changed after it was signed: {error}"]
    wanted = wanted_key(origin, key)
    if wanted is None or any(issuer == wanted for _, issuer in signers):
        return []
    return [f"{path} is signed by account {signers[0][1]}, not by {wanted}"]


def _own_key(origin: Origin) -> str | None:
    """Return the trainer's public key on the embedded broker; None if it is away."""
    secret = secret_of(origin.folder.parent / "broker" / "keys")
    if not secret.is_file():
        return None
    try:
        return str(OperatorKeys.load(secret).account_of(origin.run, "trainer").public)
    except BrokerError:
        return None


def _of_files(origin: Origin) -> list[str]:
    stated = {str(each["name"]): str(each["digest"]["sha256"]) for each in origin.statement.get("subject", [])}
    present = {str(path.relative_to(origin.folder)): path for path in files_of(origin.folder)}
    problems = [f"file {name} is missing" for name in sorted(stated.keys() - present.keys())]
    problems += [f"file {name} was added" for name in sorted(present.keys() - stated.keys())]
    for path in others_of(origin.folder):
        what = "a symbolic link" if path.is_symlink() else "no regular file"
        problems.append(f"{path.relative_to(origin.folder)} was added: it is {what}")
    for name in sorted(stated.keys() & present.keys()):
        if sha256_of(present[name]) != stated[name]:
            problems.append(f"file {name} was changed{_changed_part(origin, name, present[name])}")
    return problems


def _changed_part(origin: Origin, name: str, path: Path) -> str:
    """Return which tensors of a changed file differ."""
    stated = origin.byproduct("tensors").get(name)
    if not stated:
        return ""
    now = tensors_of(path)
    changed = [tensor for tensor, digest in stated.items() if now.get(tensor) != digest]
    if not now or len(changed) == len(stated):
        return ": its header, or all of its tensors"
    return f": {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}" if changed else ": outside of its tensors"  # noqa: PLR2004
