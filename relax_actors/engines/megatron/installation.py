"""Check that Megatron-Core is installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from relax_actors.errors import MissingPackageError

REQUIRED_MODULES = ("megatron.core",)


def require(section: str = "trainer") -> None:
    """Raise MissingPackageError, with the command that installs it, if a section's Megatron-Core is not installed."""
    missing = [name for name in REQUIRED_MODULES if not _is_installed(name)]
    if missing:
        msg = (
            f'{section}.backend = "megatron" needs {", ".join(missing)}, which is not installed; run `make megatron`, '
            "or pip install 'relax-actors[megatron]'"
        )
        raise MissingPackageError(msg)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
