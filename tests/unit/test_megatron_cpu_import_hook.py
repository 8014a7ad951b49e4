"""CPU import hook: it rewrites megatron-core only, and only without CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()


def run(code: str) -> str:
    """Output of a fresh interpreter, as modules are imported only once a process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_megatron_core_modules_are_rewritten_and_their_bytecode_is_cached_apart() -> None:
    found = run("""
import importlib.util, sys, torch
from pathlib import Path
before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
kept = torch.zeros, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type
import relax_actors.engines.megatron.mcore as mcore
assert mcore.ON_CPU
assert all(getattr(torch.cuda, name) is value for name, value in before.items())
assert kept == (torch.zeros, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type)
from megatron.core.optimizer import clip_grads
import megatron.core, megatron.core.utils as utils, transformers.utils
print(type(clip_grads.__loader__).__module__, type(transformers.utils.__loader__).__module__)
print(megatron.core.jit.jit_fuser is megatron.core.jit.noop_decorator)
import relax_actors_cpu_accelerator as accelerator
cached = Path(importlib.util.cache_from_source(utils.__file__, optimization="relaxactorscpuaccelerator"))
common = Path(importlib.util.cache_from_source(utils.__file__))
print(cached.exists() or sys.dont_write_bytecode, utils._accelerator is accelerator)
print(not common.exists() or b"relax_actors" not in common.read_bytes())
""")
    loaders = ["relax_actors.engines.megatron.cpu_import_hook", "_frozen_importlib_external"]
    assert found.split() == [*loaders, "True", "True", "True", "True"]


def test_hook_is_not_installed_with_cuda() -> None:
    found = run("""
import sys, torch
torch.cuda.is_available = lambda: True
from relax_actors.engines.megatron import cpu_import_hook
finders = list(sys.meta_path)
print(cpu_import_hook.install(), sys.meta_path == finders)
""")
    assert found.split() == ["False", "True"]


def test_installing_after_megatron_core_was_imported_raises() -> None:
    found = run("""
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")  # its import takes seconds
from relax_actors.engines.megatron import cpu_import_hook
try:
    cpu_import_hook.install()
except RuntimeError as error:
    print(error)
""")
    assert "imported before the import hook" in found


REWRITTEN = {
    "x = torch.cuda.current_device()": "x = _accelerator.current_device()",
    "x = torch.zeros(1, device='cuda')": "x = torch.zeros(1, device=_accelerator.device)",
    "x = y.cuda(non_blocking=True)": "x = y.to(_accelerator.device)",
    "x = y.to('cuda:0', torch.float)": "x = y.to(_accelerator.device, torch.float)",
    "x = torch.device('cuda')": "x = _accelerator.device",
    "x = y.type() == 'torch.cuda.FloatTensor'": "x = y.type() == 'torch.FloatTensor'",
    "x = torch.empty(1, pin_memory=True)": "x = torch.empty(1, pin_memory=False)",
    "x = 'cuda'": "x = 'cuda'",
    "x = y.cuda": "x = y.cuda",
}


@pytest.mark.parametrize("code", REWRITTEN)
def test_source_is_rewritten(code: str) -> None:
    import ast

    from relax_actors.engines.megatron.cpu_import_hook import _CpuRewriter

    tree = ast.fix_missing_locations(_CpuRewriter().visit(ast.parse(code)))
    assert ast.unparse(tree) == REWRITTEN[code]
