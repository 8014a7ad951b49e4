"""The configuration of a run: sections, validation, and reading from TOML.

Names are imported on first use: commands that read a run without validating its settings do not import pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from relax_actors.config.load import apply_settings, load_config, make_importable, validate
    from relax_actors.config.schema import Config
else:
    __getattr__ = lazy(__name__)

__all__ = ["Config", "apply_settings", "load_config", "make_importable", "validate"]
