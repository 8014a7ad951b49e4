"""Lets megatron-core run on a machine without CUDA: an import hook that touches the modules of `megatron.core` only.

megatron-core says `torch.cuda` and `device="cuda"` in some 270 places. Where there is no CUDA the hook rewrites the
syntax tree of its modules as they are imported, so that these places say `_accelerator` (the CPU) instead. torch and
every other library stay as they are, and where there is CUDA nothing is done at all.
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
    """Stands in for a CUDA stream or event: on a CPU everything has happened when the call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name in {"wait_stream", "wait_event", "record", "wait", "synchronize"}:
            return _nothing
        raise AttributeError(name)


def _nothing(*_: Any, **__: Any) -> None:
    """What a CPU need not do."""


def _accelerator() -> types.ModuleType:
    """The CPU in the words of `torch.cuda`; whatever is not said here is torch.cuda's own."""
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
        synchronize=_nothing,
        set_device=_nothing,
        empty_cache=_nothing,
        manual_seed=lambda seed: _nothing(torch.manual_seed(seed)),
        random=types.SimpleNamespace(**random),
        nvtx=types.SimpleNamespace(
            range_push=_nothing, range_pop=_nothing, range=lambda *_, **__: contextlib.nullcontext()
        ),
        __getattr__=lambda name: getattr(torch.cuda, name),
    )
    return module


def _is_cuda(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class _OnCpu(ast.NodeTransformer):
    """`torch.cuda.X` -> `_accelerator.X`, `device="cuda"`, `.cuda()`, names of CUDA tensor types, pinned memory."""

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
    """Compiles a module from its rewritten tree; its bytecode has a name that no other loader looks for."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        kept_at = Path(importlib.util.cache_from_source(path, optimization=_MODULE.replace("_", "")))
        about = Path(path).stat()
        key = xxhash.xxh3_128_digest(f"{_own_source()}|{about.st_mtime_ns}|{about.st_size}".encode())
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            data = kept_at.read_bytes()
            if data.startswith(key):
                kept: types.CodeType = marshal.loads(data[len(key) :])  # noqa: S302 as Python's own caches
                return kept
        tree = _OnCpu().visit(ast.parse(self.get_data(path), path))
        tree.body.insert(_first_statement(tree.body), ast.Import([ast.alias(_MODULE, _NAME)]))
        ast.fix_missing_locations(tree)
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                self.set_data(str(kept_at), key + marshal.dumps(code))
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == f"{PACKAGE}.jit":
            # Its fused functions are torch.compile: on a CPU the first step would wait for a C++ compiler.
            module.disable_jit_fuser()


@cache
def _own_source() -> str:
    """What rewrites: code that an older one compiled is compiled anew."""
    return f"{sys.version}|{Path(__file__).read_text()}"


def _first_statement(body: Sequence[ast.stmt]) -> int:
    """Where the first statement stands behind the docstring and `from __future__`."""
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
    """Have megatron-core imported for the CPU from now on, where there is no CUDA; tells whether that is so.

    Raises:
        RuntimeError: megatron-core has been imported already.
    """
    if torch.cuda.is_available():
        return False
    if _MODULE not in sys.modules:
        if PACKAGE in sys.modules:
            msg = (
                f"{PACKAGE} was imported before the hook that fits it to a CPU; import relax_actors' core module first"
            )
            raise RuntimeError(msg)
        sys.modules[_MODULE] = _accelerator()
        sys.meta_path.insert(0, _Finder())
    return True
