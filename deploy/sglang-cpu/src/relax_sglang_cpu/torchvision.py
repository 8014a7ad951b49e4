"""Import hook for the CUDA builds of torchvision and torchaudio on a machine without CUDA.

relax_sglang_cpu.pth imports this module at the start of every interpreter, so it is small. The compiled parts of both
packages do not load without CUDA. torchvision then fails because it registers fake kernels of two undefined operators,
torchaudio because it raises the loader's error. The Python parts of both work.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

OPERATORS = ("nms", "qnms")
AUDIO = "torchaudio._extension.utils"


class _Finder:
    """Finds nothing itself; patches the two packages when they are imported."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name == "torchvision":
            self._define_operators()
        elif name == AUDIO and _without_cuda():
            return _without_extension(PathFinder.find_spec(name, path))
        return None

    def _define_operators(self) -> None:
        import torch

        if self.library is None and _without_cuda() and not hasattr(torch.ops.torchvision, "nms"):
            self.library = torch.library.Library("torchvision", "DEF")
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _without_cuda() -> bool:
    import torch

    return torch.version.cuda is None


def _without_extension(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            module._load_lib = lambda _: False  # noqa: SLF001 the function that loads the extension

        spec.loader.exec_module = executed  # type: ignore[method-assign]
    return spec


sys.meta_path.insert(0, _Finder())
