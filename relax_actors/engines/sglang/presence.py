"""Check whether SGLang is installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from relax_actors.errors import ConfigError

FAMILIES_WITH_EXPERTS = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
"""Model types with experts whose weights `checkpoint_names` can name."""


def require() -> None:
    """Raise an error if SGLang is not installed.

    Raises:
        ConfigError: SGLang is not installed; names the command that installs it.
    """
    missing = [name for name in ("sglang", "sgl_kernel") if find_spec(name) is None]
    if missing:
        msg = f'rollout.backend = "sglang" needs {", ".join(missing)}, which is not installed; run `make sglang`'
        raise ConfigError(msg)
