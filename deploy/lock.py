"""Lock the packages of pyproject.toml with hashes: `python deploy/lock.py` writes deploy/requirements/.

`--check` compares the files with pyproject.toml, without network.
One file for the packages of every installation, `base.txt`, and one for each extra of `EXTRAS` with all that it needs.
Versions that are in the files stay; `--upgrade` takes the newest. Needs uv.

torch is not in the files, nor are the CUDA libraries that only torch needs: which build of torch is installed depends
on the machine, and builds for CPUs have other hashes, from an index of their own. The extras `megatron` and `sglang`
pin their own main package, whose requirements depend on the build of torch, too. torchaudio is in them: from 2.11 on it
requires no torch, and relax-actors uses none of its compiled parts (relax_actors/media/resample.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "requirements"
EXTRAS = ("media", "test", "lint", "docs")
BUILD = "hatchling>=1.27\neditables>=0.5\n"
"""What builds relax-actors itself, without the isolated environment of pip, which would take unlocked packages."""
BY_MACHINE = re.compile(r"torch|triton|nvidia-(?!ml-py$).*|cuda-.*")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)", re.MULTILINE)
HEAD = "# Written by deploy/lock.py (make lock); torch is left out, see there.\n"


def pins(text: str) -> dict[str, str]:
    """Return the version of each package in a file."""
    return {canonicalize_name(found["name"]): found["version"] for found in _PIN.finditer(text)}


def pinned_lines(text: str) -> str:
    """Return the pins of a file with their markers, without hashes: a package may have a version for each Python."""
    lines = (line.rstrip("\\ ") for line in text.splitlines() if _PIN.match(line))
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


def without_torch(text: str) -> str:
    """Return a file without the packages that depend on the machine."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return "".join(block for block in blocks if not BY_MACHINE.fullmatch(re.split(r"[=\s;]", block, maxsplit=1)[0]))


def wanted(extra: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml for an installation with an extra; extras may name others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, names, seen = [*project["dependencies"]], [extra] if extra else [], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in project["optional-dependencies"][name]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                names += requirement.extras
            else:
                found.append(text)
    return [Requirement(text) for text in found]


def problems(extra: str, text: str) -> list[str]:
    """Return how a file does not fit pyproject.toml, or is not locked; empty if it is right."""
    locked, file, found = pins(text), f"{extra or 'base'}.txt", []
    for requirement in wanted(extra):
        name = canonicalize_name(requirement.name)
        if BY_MACHINE.fullmatch(name) or (requirement.marker is not None and not requirement.marker.evaluate()):
            continue
        if name not in locked:
            found.append(f"{file} lacks {name}")
        elif not requirement.specifier.contains(locked[name], prereleases=True):
            found.append(f"{file} has {name}=={locked[name]}, and pyproject.toml asks for {requirement}")
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    found += [f"{file} has no hash for {block.split()[0]}" for block in blocks if "--hash=sha256:" not in block]
    found += [f"{file} names the index of a registry" for line in text.splitlines() if "://" in line]
    return found


def check() -> list[str]:
    """Return the problems of all files, which must also agree with each other."""
    found, versions = [], {}
    for extra in ("", *EXTRAS):
        path = FOLDER / f"{extra or 'base'}.txt"
        if not path.exists():
            found.append(f"{path.name} is missing")
            continue
        found += problems(extra, path.read_text())
        for name, version in pins(path.read_text()).items():
            if versions.setdefault(name, version) != version:
                found.append(f"{path.name} has {name}=={version}, another file {versions[name]}")
    return found


def compile_all(constraints: str) -> None:
    """Write all files; `constraints` pins versions to keep."""
    with tempfile.TemporaryDirectory() as scratch:
        inputs, kept = Path(scratch) / "build.in", Path(scratch) / "kept.txt"
        inputs.write_text(BUILD)
        for extra in ("", *EXTRAS):
            kept.write_text(constraints)
            command = ["uv", "pip", "compile", "pyproject.toml", str(inputs), "--universal", "--python-version", "3.11"]
            command += ["--generate-hashes", "--no-header", "--no-annotate", "--constraint", str(kept), "--quiet"]
            command += ["--extra", extra] if extra else []
            text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
            # What the first files took, the next take, too.
            known = pins(constraints)
            new = pinned_lines(without_torch(text)).splitlines(keepends=True)
            constraints += "".join(line for line in new if not pins(line).keys() & known.keys())
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{extra or 'base'}.txt").write_text(HEAD + without_torch(text))


def main(arguments: list[str]) -> None:
    """Lock or check; exit code 1 if the files do not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--check", action="store_true", help="check without network that the files fit pyproject.toml")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--constraint", type=Path, help="file with versions to take, e.g. of pip freeze")
    chosen = parser.parse_args(arguments)
    if not chosen.check:
        known = "".join(path.read_text() for path in sorted(FOLDER.glob("*.txt"))) if not chosen.upgrade else ""
        compile_all(chosen.constraint.read_text() if chosen.constraint is not None else pinned_lines(known))
    if found := check():
        sys.exit("\n".join(["deploy/requirements do not fit pyproject.toml; run `make lock`:", *found]))


if __name__ == "__main__":
    main(sys.argv[1:])
