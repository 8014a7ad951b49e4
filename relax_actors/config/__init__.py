"""The configuration of a run: sections, validation, and reading from TOML."""

from relax_actors.config.load import apply_settings, load_config, make_importable, validate
from relax_actors.config.schema import Config

__all__ = ["Config", "apply_settings", "load_config", "make_importable", "validate"]
