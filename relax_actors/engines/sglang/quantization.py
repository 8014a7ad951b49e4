"""Settings of servers that quantise the weights they load, and which models they can hold. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_actors.algorithms.named_functions import spec_of_loss
from relax_actors.config import Config
from relax_actors.data.model_folder import ModelFacts
from relax_actors.engines.protocols.footprint import served_bytes
from relax_actors.engines.sglang import presence
from relax_actors.errors import ConfigError, MissingPackageError

BLOCK = 128
"""Rows and columns of a block with one scale, the size that SGLang's kernels compute on every GPU with float8."""
FLOAT8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
"""`quantization_config` of a checkpoint in FP8, with which a server starts."""
FLOAT8_KERNELS = {"fp8-gemm-backend": "triton", "moe-runner-backend": "triton"}
"""Arguments of servers on GPUs. These kernels read weights and scales as they are loaded; the kernels that SGLang
chooses on Blackwell need another form, which the next update could not write."""
SERVED = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Types of models whose linear layers are those of attention, MLP and experts, under the names of `sizes_of`."""
SETTING = "rollout.sglang.quantization"


def check_quantization(
    config: Config, fields: Mapping[str, Any], facts: ModelFacts, *, takes_media: bool
) -> Iterator[str]:
    """Check that servers can hold the model quantised; yields notes.

    Args:
        config: of the run.
        fields: the part of config.json that describes the model of text.
        facts: of the model.
        takes_media: whether it sees or hears.

    Raises:
        ConfigError: names the setting or the size that does not fit, and the remedy.
    """
    settings = config.rollout.sglang
    if (kind := settings.quantization) == "none":
        return
    setting = f'{SETTING} = "{kind}"'
    if kind == "int4":
        msg = (
            f"{setting}: SGLang 0.5.23 repacks INT4 weights for its kernels (Marlin) when it loads them; parameters of "
            "linear layers then have no loader for the next update, and experts get a new workspace at each update, "
            'which captured CUDA graphs do not use; use "fp8"'
        )
        raise ConfigError(msg)
    if settings.urls:
        msg = f"{setting} needs servers that the run starts; leave rollout.sglang.urls out, or start those quantised"
        raise ConfigError(msg)
    if config.lora is not None and not settings.merge_adapter:
        msg = f"{setting} quantises full sets of weights; with [lora] set rollout.sglang.merge_adapter = true"
        raise ConfigError(msg)
    if takes_media or facts.model_type not in SERVED:
        msg = f'{setting} is for text models of the types {", ".join(SERVED)}, not {facts.model_type}; set it to "none"'
        raise ConfigError(msg)
    _check_sizes(setting, fields, settings.tensor_parallel)
    _check_machine(setting, config)
    wide, held = served_bytes(config), layer_bytes(config)
    mib = [(facts.tables * wide + (facts.parameters - facts.tables) * each) / (1 << 20) for each in (held, wide)]
    yield (
        f"{setting}: a server holds {mib[0]:.3g} MiB of weights instead of {mib[1]:.3g}; published weights stay in the "
        "run's precision"
    )
    algorithm, ratio = config.algorithm, spec_of_loss(config.algorithm).ratio
    is_compared = ratio == "rollout" or (ratio != "none" and algorithm.proximal == "rollout")
    if not is_compared and algorithm.correction.kind == algorithm.reject.kind == "none":
        yield (
            f"{setting}: the rollout samples from a policy that differs from the trainer's, and the algorithm does not "
            'correct for it; set algorithm.correction.kind = "tis", or algorithm.reject.kind'
        )


def sizes_of(fields: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Return the sizes of a rank's parts of linear layers, by the fields of config.json that they follow from."""
    heads = int(fields["num_attention_heads"])
    width = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
    shared = int(fields.get("num_key_value_heads") or heads)
    sizes = {
        "hidden_size": int(fields["hidden_size"]),
        "num_attention_heads * head_dim": heads * width // ranks,
        "num_key_value_heads * head_dim": max(1, shared // ranks) * width,
    }
    is_sparse = "moe_intermediate_size" in fields and fields.get("decoder_sparse_step", 1) == 1
    has_dense = not is_sparse or bool(fields.get("mlp_only_layers"))
    names = ["intermediate_size"] if has_dense else []
    for name in (*names, "moe_intermediate_size", "shared_expert_intermediate_size"):
        if size := fields.get(name):
            sizes[name] = int(size) // ranks
    return sizes


def _check_sizes(setting: str, fields: Mapping[str, Any], ranks: int) -> None:
    """Refuse layers whose parts blocks do not divide."""
    for name, size in sizes_of(fields, ranks).items():
        if size % BLOCK:
            of_ranks = f" on each of {ranks} ranks; lower rollout.sglang.tensor_parallel, or" if ranks > 1 else ";"
            msg = f'{setting}: blocks of {BLOCK} do not divide {name} = {size}{of_ranks} set it to "none"'
            raise ConfigError(msg)


def _check_machine(setting: str, config: Config) -> None:
    """Refuse a precision that kernels for GPUs lack, and a substitute for them without those of FP8."""
    dtype = config.trainer.precision if config.rollout.sglang.dtype == "auto" else config.rollout.sglang.dtype
    if dtype == "float32" and (config.rollout.device.startswith("cuda") or not presence.computes_on_cpu()):
        msg = f'{setting}: kernels for GPUs compute in half precision; set rollout.sglang.dtype = "bfloat16"'
        raise ConfigError(msg)
    if not presence.computes_float8():
        msg = f"{setting} needs a newer relax-sglang-cpu; run `make sglang`"
        raise MissingPackageError(msg)


def layer_bytes(config: Config) -> float:
    """Return the bytes a parameter of a server's layers; embeddings and output head are not quantised."""
    return served_bytes(config) if config.rollout.sglang.quantization == "none" else 1 + 4 / BLOCK**2
