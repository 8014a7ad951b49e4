"""Modules that the zygote imports before it forks actors."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

PRELOAD = """
import importlib, sys
from relax_actors.supervision.zygote import PRELOADED
for module in PRELOADED:
    importlib.import_module(module)
from transformers import utils
from transformers.utils import import_utils
assert utils.is_scipy_available is import_utils.is_scipy_available
print([name for name in ("scipy.optimize", "sklearn", "torch") if name in sys.modules])
"""


@pytest.mark.skipif(not (find_spec("scipy") or find_spec("sklearn")), reason="scipy and scikit-learn are not installed")
def test_zygote_imports_neither_scipy_nor_scikit_learn() -> None:
    command = [sys.executable, "-c", PRELOAD]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip() == "['torch']"
