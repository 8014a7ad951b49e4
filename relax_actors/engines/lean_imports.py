"""Import the models and the generation of transformers without packages that no engine uses.

Where they are installed, transformers imports scipy and scikit-learn for losses of object detection and for assisted
generation, torchaudio, soundfile and librosa to read sound files. That takes a quarter of the seconds in which the
zygote starts, a third of those in which an engine builds its model, and 140 MiB of each process. Triton, which
torch imports for it, is of use with a GPU alone: another 70 MiB.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch
from transformers import utils

SKIPPED = tuple(f"is_{name}_available" for name in ("scipy", "sklearn", "torchaudio", "soundfile", "librosa"))
IMPORTED = (
    "transformers.generation.candidate_generator",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.audio_utils",
    "torch.utils.flop_counter",  # of torch's attention for packed sequences
)


def import_transformers() -> None:
    """Import the modules while transformers believes that none of these packages is installed."""
    # `torch.cuda.is_available()` would initialise CUDA, which then fails in forks of this process.
    has_gpu = torch.version.cuda is not None and any(Path("/dev").glob("nvidia[0-9]*"))
    hidden = () if has_gpu or torch.version.hip is not None or "triton" in sys.modules else ("triton",)
    original = {name: getattr(utils, name) for name in SKIPPED if hasattr(utils, name)}
    try:
        for name in original:
            setattr(utils, name, lambda: False)
        for name in hidden:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
        for module in IMPORTED:
            import_module(module)
    finally:
        for name, function in original.items():
            setattr(utils, name, function)
        for name in hidden:
            del sys.modules[name]


import_transformers()
