"""`relax fingerprint`: the digest of a set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fingerprint(path: Annotated[Path, typer.Argument(help="Checkpoint, model folder or safetensors file.")]) -> None:
    """Print the fingerprint of weights; equal fingerprints mean equal weights."""
    from relax_actors.engines.torch.stored_weights import fingerprint_of

    typer.echo(fingerprint_of(path))
