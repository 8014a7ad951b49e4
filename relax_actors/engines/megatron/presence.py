"""Whether Megatron-Core is installed, asked without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from relax_actors.errors import ConfigError

NEEDED = ("megatron.core", "psutil")


def require(user: str = "trainer") -> None:
    """Refuse to go on without Megatron-Core.

    Args:
        user: the section whose `backend` it is.

    Raises:
        ConfigError: it is not installed; names the command that installs it.
    """
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        msg = (
            f'{user}.backend = "megatron" needs {", ".join(missing)}, which is not installed; run `make megatron`, '
            "or pip install 'relax-actors[megatron]'"
        )
        raise ConfigError(msg)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
