"""The configuration of a run."""

from relax_actors.config.load import apply_settings, load_config, make_importable, validate
from relax_actors.config.schema import BUILT_IN, Config

__all__ = ["BUILT_IN", "Config", "apply_settings", "load_config", "make_importable", "validate"]
