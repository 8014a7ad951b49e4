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
import transformers.models.qwen3.modeling_qwen3
unused = ("scipy.optimize", "sklearn", "torchaudio", "soundfile", "librosa")
print([name for name in (*unused, "torch") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(find_spec, ("scipy", "sklearn", "torchaudio", "soundfile"))), reason="none of the packages is installed"
)
def test_zygote_and_models_import_no_package_that_no_engine_uses() -> None:
    command = [sys.executable, "-c", PRELOAD]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip() == "['torch']"
