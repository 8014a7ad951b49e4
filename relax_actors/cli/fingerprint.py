"""`relax fingerprint`: the digest of a set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fingerprint(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Checkpoint, model folder, or safetensors files that hold a set of weights together."),
    ],
) -> None:
    """Print the fingerprint of weights; equal fingerprints mean equal weights."""
    import relax_actors.engines.lean_imports  # noqa: F401 before the next line imports transformers
    from relax_actors.engines.torch.stored_weights import fingerprint_of

    typer.echo(fingerprint_of(*paths))
