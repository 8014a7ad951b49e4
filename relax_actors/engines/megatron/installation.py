"""Check that Megatron-Core is installed, without importing it."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from relax_actors.errors import MissingPackageError

REQUIRED_MODULES = ("megatron.core",)
GROUPED_SINCE = (2, 10)
"""First version of torch with `torch.nn.functional.grouped_mm`."""


def require(section: str = "trainer") -> None:
    """Raise MissingPackageError, with the command that installs it, if a section's Megatron-Core is not installed."""
    missing = [name for name in REQUIRED_MODULES if not _is_installed(name)]
    if missing:
        msg = (
            f'{section}.backend = "megatron" needs {", ".join(missing)}, which is not installed; run `make megatron`, '
            "or pip install 'relax-actors[megatron]'"
        )
        raise MissingPackageError(msg)


def require_grouped_product(section: str = "trainer", installed: str | None = None) -> None:
    """Raise MissingPackageError if the installed torch, or a version, has no `grouped_mm`."""
    installed = installed or version("torch")
    if tuple(map(int, installed.split(".")[:2])) < GROUPED_SINCE:
        msg = (
            f"{section}.megatron.grouped_experts = true needs torch {'.'.join(map(str, GROUPED_SINCE))} or newer, "
            f"{installed} is installed; leave it out, or install a newer torch"
        )
        raise MissingPackageError(msg)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
