"""Process of a server.

Usage: `python -m relax_actors.engines.sglang.launch <run folder> <number> <port>`.

SGLang's own launcher takes the API key as an argument, which every user of the machine can read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # SGLang's child processes import this module
    from relax_actors.config import Config

KEY_VARIABLE = "RELAX_SGLANG_KEY"
"""Environment variable with the API key."""
FROZEN_VARIABLE = "RELAX_SGLANG_FROZEN"
"""Environment variable of a server of another model than the policy: JSON with its folder `model`, the `device`, and
whether it is a reward model, `scores`."""
GRAMMARS_VARIABLE = "RELAX_SGLANG_GRAMMARS"
"""Environment variable with the model folder of a server that applies grammars."""
OVERRIDES = "--json-model-override-args"
QUANTIZATION_VARIABLE = "RELAX_SGLANG_QUANTIZATION"
"""Environment variable of a server that quantises the weights that it loads."""


def main() -> None:
    """Serve until killed."""
    key = os.environ.pop(KEY_VARIABLE)
    from relax_actors.data.model_folder import measure  # noqa: PLC0415
    from relax_actors.devices.binding import own_device  # noqa: PLC0415
    from relax_actors.engines.sglang.launch_media import prepare_media, replace_processors, served_family  # noqa: PLC0415
    from relax_actors.engines.sglang.server_arguments import server_arguments  # noqa: PLC0415 SGLang's child processes import this module
    from relax_actors.runtime.run_folder import RunFolder  # noqa: PLC0415

    config = RunFolder(Path(sys.argv[1])).load_config()
    frozen = json.loads(os.environ.pop(FROZEN_VARIABLE, "{}"))
    if frozen:
        config = of_frozen_model(config, frozen["device"])
    folder = Path(frozen["model"]) if frozen else config.model_path
    device = own_device(config.rollout.device)
    if device == "auto":
        import torch  # noqa: PLC0415

        cuda = torch.cuda.is_available()
    else:
        cuda = device.startswith("cuda")
    if not cuda:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # SGLang compiles functions of the sampler and of towers on their first call: on a busy CPU that takes minutes,
        # in which no token comes, for no gain.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if (ranks := config.rollout.sglang.tensor_parallel) > 1:  # SGLang would give each rank a NUMA node
            cores = sorted(os.sched_getaffinity(0))
            shares = (str(cores[rank % len(cores)]) for rank in range(ranks))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(shares))
    # The context of a server has a margin, which no request uses.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    model = folder
    if (family := served_family(model)) is not None:
        model = prepare_media(model, family.spec, deterministic=config.run.deterministic)
    facts = measure(folder)
    scores = bool(frozen.get("scores"))
    if (frozen or config.gateway is not None) and not scores:
        os.environ[GRAMMARS_VARIABLE] = str(folder)
    if config.rollout.sglang.quantization != "none":
        os.environ[QUANTIZATION_VARIABLE] = "1"
    arguments = server_arguments(config, model, facts, int(sys.argv[3]), key=key, cuda=cuda)
    from sglang.launch_server import run_server  # noqa: PLC0415
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    load_plugins()
    _extend()
    if family is not None:
        replace_processors()
    more = ["--is-embedding"] if scores else config_arguments(config, model)
    run_server(prepare_server_args([*arguments, *more]))


def _extend() -> None:
    """Have SGLang's layers quantise what they load, in each of its processes."""
    if QUANTIZATION_VARIABLE in os.environ:
        from relax_actors.engines.sglang.server_quantization import extend_layers  # noqa: PLC0415

        extend_layers()


def of_frozen_model(config: Config, device: str) -> Config:
    """Return the settings of the server of a frozen model, without those of the policy's adapter, experts and GPUs.

    It takes SGLang's own share of the memory that is free when it starts, so also beside a server of the policy.
    """
    own = {"tensor_parallel": 1, "arguments": [], "memory_fraction": None, "kv_tokens": None, "quantization": "none"}
    own |= {"max_concurrent_samples": None}
    sglang = config.rollout.sglang.model_copy(update=own)
    rollout = config.rollout.model_copy(update={"device": device, "sglang": sglang})
    trainer = config.trainer.model_copy(update={"router_replay": False})
    return config.model_copy(update={"rollout": rollout, "trainer": trainer, "lora": None})


def config_arguments(config: Config, model: Path) -> list[str]:
    """Return arguments that name the model's class where its config does not, and the form of quantised weights.

    A config made from `model.architecture` names no class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    from relax_actors.engines.sglang.quantization import FLOAT8_CONFIG  # noqa: PLC0415

    fields = json.loads((model / "config.json").read_text())
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields["model_type"])
    own, changed = _overrides(config.rollout.sglang.arguments), dict[str, Any]()
    if not (fields | own).get("architectures") and name is not None:
        changed["architectures"] = [name]
    if config.rollout.sglang.quantization == "fp8":
        changed["quantization_config"] = FLOAT8_CONFIG
    return [OVERRIDES, json.dumps(own | changed)] if changed else []


def _overrides(arguments: list[str]) -> dict[str, Any]:
    """Return the fields of config.json that a user's arguments replace; SGLang reads the last such argument alone."""
    replaced = ""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name == OVERRIDES:
            replaced = value if equals else following
    return dict(json.loads(replaced or "{}"))


if __name__ == "__mp_main__" and GRAMMARS_VARIABLE in os.environ:  # a child process of SGLang
    from relax_actors.engines.sglang.server_grammars import register

    register(Path(os.environ[GRAMMARS_VARIABLE]))
if __name__ == "__mp_main__":
    _extend()
if __name__ == "__main__":
    main()
