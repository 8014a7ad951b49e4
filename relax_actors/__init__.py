"""relax-actors: reinforcement-learning post-training as an actor system on NATS JetStream."""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Give the public names; each is imported when first asked for, so that importing the package is cheap."""
    homes = {"Role": "actor", "Row": "actor", "Drop": "actor", "StatefulRole": "actor", "RowError": "errors"}
    if name in homes:
        return getattr(importlib.import_module(f"relax_actors.{homes[name]}"), name)
    msg = f"module 'relax_actors' has no attribute {name!r}"
    raise AttributeError(msg)
