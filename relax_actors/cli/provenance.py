"""`relax provenance`: which rows, versions, code and data made a model."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import AsJson

if TYPE_CHECKING:
    from relax_actors.replay.origin import Origin


UNKNOWN_SIGNER = 3
"""Exit code of a check that found no change, but knows no account that must have signed."""


def provenance(
    model: Annotated[str, typer.Argument(help="Folder of a model that a run exported, or a run.", metavar="MODEL")],
    json: AsJson = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check the signature and every file. Exit code 1: something was changed; 3: the signer is unknown.",
        ),
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="Public key of the account that must have signed it, A...", metavar="KEY")
    ] = None,
) -> None:
    """Show which rows, versions, code and data made the weights of a model.

    The statement lies beside the model, in `provenance.json` (in-toto, SLSA), signed with a key of the run.
    """
    from relax_actors.replay.origin import problems_of, read_origin, signers_of, wanted_key

    folder = Path(model)
    if not folder.is_dir() and (Path("runs") / model).is_dir():
        folder = Path("runs") / model
    origin = read_origin(folder)
    problems = problems_of(origin, key) if check else []
    is_known = not check or wanted_key(origin, key) is not None
    if json:
        body = (
            origin.statement
            if not check
            else {
                "model": str(origin.folder),
                "valid": False if problems else True if is_known else None,
                "problems": problems,
                "signers": [] if problems else [{"user": user, "account": key} for user, key in signers_of(origin)],
            }
        )
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        _show(origin, problems, check=check, is_known=is_known)
    raise typer.Exit(1 if problems else 0 if is_known else UNKNOWN_SIGNER)


def _show(origin: Origin, problems: list[str], *, check: bool, is_known: bool) -> None:
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable
    from relax_actors.replay.origin import signers_of
    from relax_actors.weights.statement import STEPS

    screen = Screen()
    listed = origin.folder / STEPS
    steps = [json_module.loads(line) for line in listed.read_text().splitlines()] if listed.is_file() else []
    rows, tokens = sum(len(step["rows"]) for step in steps), sum(step["tokens"] for step in steps)
    weights = origin.byproduct("weights")
    screen.show(printable(f"{origin.folder}: {len(steps)} steps of run {origin.run}"), "bold")
    screen.show(printable(f"  weights {weights.get('first')} -> {weights.get('last')}"))
    screen.show(f"  {rows} rows, {tokens} trained tokens; each step in {STEPS}")
    for each in origin.dependencies:
        digests = ", ".join(f"{name} {value}" for name, value in each.get("digest", {}).items())
        reason = each.get("annotations", {}).get("notHashed")
        parts = [each.get("uri", ""), digests, f"(not hashed: {reason})" if reason else ""]
        screen.show(printable(f"  {each['name']}: {' '.join(filter(None, parts))}"))
    if not problems:
        for name, issuer in signers_of(origin) if check else ():
            screen.show(printable(f"  signed by {name}, account {issuer}"))
    for problem in problems:
        screen.show(printable(f"problem: {problem}"))
    if check and not problems and not is_known:
        screen.show("the model is what the statement says, but any key could have signed it: give --key ACCOUNT")
    elif check:
        screen.show("the model is what the statement says" if not problems else "the model is not what was exported")
