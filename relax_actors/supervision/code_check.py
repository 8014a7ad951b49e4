"""Check of a role's code in a process of its own: it must import, and read and write the same columns as before.

Run as `python -m relax_actors.supervision.code_check <run folder> <role>`, with the copy of the code in the
environment. The process prints what the role reads and writes. The root cannot import two versions of a module itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_actors.config.load import CODE_VARIABLE
from relax_actors.errors import ConfigError
from relax_actors.roles import make_role, spec_of
from relax_actors.runtime import Role, StatefulRole
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.environment import without_secrets

SECONDS = 120.0
"""Time for the code to be imported."""


def check_same_columns(folder: RunFolder, role: str, copies: Sequence[Path | None]) -> None:
    """Check that all copies of a role's code import, and read and write the same columns; raises ConfigError if one
    does not, or the columns differ.
    """
    started = [_start(folder, role, copy) for copy in copies]
    try:
        old, *others = [_result(process, role) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for new in others:
        if changed := sorted(name for name in old if old[name] != new.get(name)):
            what = "; ".join(f"{name} {old[name]} -> {new.get(name)}" for name in changed)
            msg = (
                f"the new code of {role} has other columns than the code that runs: {what}. The run's consumers and "
                "credentials follow from them; stop the run and start it again, or keep the columns"
            )
            raise ConfigError(msg)


def _start(folder: RunFolder, role: str, copy: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __spec__.name, str(folder.root), role]
    environment = without_secrets(os.environ, ()) | ({CODE_VARIABLE: str(copy)} if copy is not None else {})
    return subprocess.Popen(  # noqa: S603
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _result(process: subprocess.Popen[str], role: str) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        msg = f"the code of {role} is not imported within {SECONDS:g} s; look for work that it does at its import"
        raise ConfigError(msg) from error
    if process.returncode != 0:
        reason = err.strip().splitlines()[-1] if err.strip() else f"exit code {process.returncode}"
        msg = f"the code of {role} does not import: {reason}"
        raise ConfigError(msg)
    return dict(json.loads(out.strip().splitlines()[-1]))


def columns_of(folder: RunFolder, role: str) -> dict[str, Any]:
    """Return what a role reads and writes, with the code that this process imports, as JSON."""
    config = folder.load_config()
    instance: Role = make_role(config, role)
    spec = spec_of(config, role)
    follows = instance.follows(config) if isinstance(instance, StatefulRole) else []
    return {
        "reads": [*instance.inputs(config), *follows],
        "writes": list(spec.writes),
        "kinds": list(spec.kinds),
        "numbered": list(spec.numbered),
        "serves": [*spec.serves, *spec.requests],
    }


def main() -> None:
    """Print the columns of a role; the process's entry point."""
    try:
        sys.stdout.write(json.dumps(columns_of(RunFolder(Path(sys.argv[1])), sys.argv[2])) + "\n")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
