"""Import the models and the generation of transformers without scipy and scikit-learn.

Where both are installed, transformers imports them for losses of object detection and for assisted generation, which
no engine uses. That takes a quarter of the seconds in which the zygote starts.
"""

from __future__ import annotations

from importlib import import_module

from transformers import utils

SKIPPED = ("is_scipy_available", "is_sklearn_available")
IMPORTED = ("transformers.generation.candidate_generator", "transformers.modeling_utils")


def import_transformers() -> None:
    """Import the modules while transformers believes that neither package is installed."""
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
