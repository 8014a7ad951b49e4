"""`relax fingerprint`: the digest of a set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fingerprint(path: Annotated[Path, typer.Argument(help="Checkpoint, model folder or safetensors file.")]) -> None:
    """Print the fingerprint of weights; equal fingerprints mean equal weights."""
    from relax_actors.errors import ConfigError
    from relax_actors.weights import files as weights

    shards = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
    if not shards:
        msg = f"{path} holds no weights; give a checkpoint or model folder with model*.safetensors"
        raise ConfigError(msg)
    typer.echo(weights.fingerprint(weights.load(shards).items()))
