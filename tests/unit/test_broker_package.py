"""The public names of the package `broker`, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import broker

HEAVY = ("nats", "numpy", "msgpack", "structlog", "cryptography", "relax_actors")


def loaded_after(statement: str) -> list[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", broker.__all__)
def test_public_name_is_importable(name: str) -> None:
    assert getattr(broker, name).__module__.startswith("broker.")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tabel'; it exports Address, "):
        broker.Tabel  # noqa: B018


@pytest.mark.parametrize("module", ["broker", "broker.process", "broker.errors", "broker.subjects", "broker.files"])
def test_import_loads_no_dependencies(module: str) -> None:
    assert loaded_after(f"import {module}") == []
