"""Import hook that lets megatron-core run without CUDA.

megatron-core uses `torch.cuda` and `device="cuda"` in about 270 places. Without CUDA the hook rewrites the syntax tree
of the modules of `megatron.core` on import, so that these places use `_accelerator` (the CPU). torch and all other
libraries stay unpatched, and with CUDA the hook is not installed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import sys
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

PACKAGE = "megatron.core"
_NAME = "_accelerator"
_MODULE = "relax_actors_cpu_accelerator"
_CPU = torch.device("cpu")


class _Stream:
    """Replacement for a CUDA stream or event: on the CPU all work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name in {"wait_stream", "wait_event", "record", "wait", "synchronize"}:
            return _no_op
        raise AttributeError(name)


def _no_op(*_: Any, **__: Any) -> None:
    """Replacement for calls that the CPU does not need."""


def _accelerator() -> types.ModuleType:
    """Replacement for the module `torch.cuda` on the CPU; other attributes are torch.cuda's."""
    stream = _Stream()
    random = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    module = types.ModuleType(_MODULE)
    module.__dict__.update(
        random,
        device=_CPU,
        current_device=lambda: _CPU,
        device_count=lambda: 1,
        is_available=lambda: False,
        is_current_stream_capturing=lambda: False,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=lambda _: contextlib.nullcontext(),
        Stream=_Stream,
        Event=_Stream,
        synchronize=_no_op,
        set_device=_no_op,
        empty_cache=_no_op,
        manual_seed=lambda seed: _no_op(torch.manual_seed(seed)),
        random=types.SimpleNamespace(**random),
        nvtx=types.SimpleNamespace(
            range_push=_no_op, range_pop=_no_op, range=lambda *_, **__: contextlib.nullcontext()
        ),
        __getattr__=lambda name: getattr(torch.cuda, name),
    )
    return module


def _is_cuda(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class _CpuRewriter(ast.NodeTransformer):
    """Rewrites uses of CUDA in a syntax tree.

    They are `torch.cuda.X`, `device="cuda"`, `.cuda()`, names of CUDA tensor types, and pinned memory.
    """

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAME, ast.Load()), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        value = node.value
        if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "device" and _is_cuda(keyword.value):
                keyword.value = _device(keyword.value)
            if keyword.arg == "pin_memory":
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        function = node.func
        if not isinstance(function, ast.Attribute):
            return node
        if function.attr == "cuda":
            moved = ast.Attribute(function.value, "to", ast.Load())
            return ast.copy_location(ast.Call(moved, [_device(node)], []), node)
        if node.args and _is_cuda(node.args[0]):
            if function.attr == "to":
                node.args[0] = _device(node)
            if function.attr == "device" and isinstance(function.value, ast.Name) and function.value.id == "torch":
                return _device(node)
        return node


def _device(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Attribute(ast.Name(_NAME, ast.Load()), "device", ast.Load()), node)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles rewritten modules; caches bytecode under a name that other loaders ignore."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        cache_path = Path(importlib.util.cache_from_source(path, optimization=_MODULE.replace("_", "")))
        source = Path(path).stat()
        key = xxhash.xxh3_128_digest(f"{_hook_version()}|{source.st_mtime_ns}|{source.st_size}".encode())
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            data = cache_path.read_bytes()
            if data.startswith(key):
                cached: types.CodeType = marshal.loads(data[len(key) :])  # noqa: S302 same trust as Python's own bytecode caches
                return cached
        tree = _CpuRewriter().visit(ast.parse(self.get_data(path), path))
        tree.body.insert(_first_statement(tree.body), ast.Import([ast.alias(_MODULE, _NAME)]))
        ast.fix_missing_locations(tree)
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                self.set_data(str(cache_path), key + marshal.dumps(code))
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == f"{PACKAGE}.jit":
            # jit_fuser is torch.compile: on a CPU the first step would spend seconds in a C++ compiler.
            module.disable_jit_fuser()


@cache
def _hook_version() -> str:
    """Source of this hook, part of the cache key: a changed hook recompiles all modules."""
    return f"{sys.version}|{Path(__file__).read_text()}"


def _first_statement(body: Sequence[ast.stmt]) -> int:
    """Index of the first statement after the docstring and the `from __future__` imports."""
    for i, node in enumerate(body):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")):
            return i
    return len(body)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> bool:
    """Install the hook without CUDA, before megatron-core is imported; return whether it computes on the CPU."""
    if torch.cuda.is_available():
        return False
    if _MODULE not in sys.modules:
        if PACKAGE in sys.modules:
            msg = (
                f"{PACKAGE} was imported before the import hook that adapts it to the CPU; "
                "import relax_actors.engines.megatron.mcore first"
            )
            raise RuntimeError(msg)
        sys.modules[_MODULE] = _accelerator()
        sys.meta_path.insert(0, _Finder())
    return True
