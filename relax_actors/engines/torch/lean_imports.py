"""Import the models and the generation of transformers without packages that no engine uses.

Where they are installed, transformers imports scipy and scikit-learn for losses of object detection and for assisted
generation, torchaudio, soundfile and librosa to read sound files. That takes a quarter of the seconds in which the
zygote starts, and a third of those in which an engine builds its model.
"""

from __future__ import annotations

from importlib import import_module

from transformers import utils

SKIPPED = tuple(f"is_{name}_available" for name in ("scipy", "sklearn", "torchaudio", "soundfile", "librosa"))
IMPORTED = (
    "transformers.generation.candidate_generator",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.audio_utils",
)


def import_transformers() -> None:
    """Import the modules while transformers believes that none of these packages is installed."""
    original = {name: getattr(utils, name) for name in SKIPPED if hasattr(utils, name)}
    try:
        for name in original:
            setattr(utils, name, lambda: False)
        for module in IMPORTED:
            import_module(module)
    finally:
        for name, function in original.items():
            setattr(utils, name, function)


import_transformers()
