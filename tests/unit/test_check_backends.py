"""`relax check` refuses settings of unused backends, and models, ranks and memory that a backend cannot have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relax_actors.checks import capacity, examine
from relax_actors.checks.capacity import host_bytes, memory_of_roles, shared_bytes
from relax_actors.checks.machine import has_gpu, usable_cores
from relax_actors.config import load_config
from relax_actors.data.model_folder import ModelFacts
from relax_actors.devices.machine import Memory
from relax_actors.engines.backends import unused_settings
from relax_actors.engines.protocols.footprint import PROCESS_BYTES
from relax_actors.engines.sglang.presence import has_experts, serves
from relax_actors.engines.sglang.quantization import layer_bytes
from relax_actors.engines.torch.backend import TorchTrainingBackend
from relax_actors.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
CLUSTER = Path(__file__).parents[1] / "support" / "cluster.toml"
PPO = DEMO.parents[1] / "ppo" / "ppo.toml"
URLS = ["rollout.backend=sglang", "rollout.sglang.urls=['http://127.0.0.1:1']"]
CPU = ["trainer.device=cpu", "rollout.device=cpu"]
FACTS = ModelFacts(parameters=1 << 20, context_length=64, vocabulary=14, model_type="qwen3")
MIB = 1 << 20


def errors(*overrides: str, config: Path = DEMO) -> tuple[str, ...]:
    return examine(load_config(config, list(overrides))).errors


@pytest.mark.parametrize(
    ("setting", "chosen", "other"),
    [
        ("trainer.megatron.ranks=8", 'trainer.backend = "torch"', 'trainer.backend = "megatron"'),
        ("rollout.sglang.kv_tokens=9", 'rollout.backend = "transformers"', 'rollout.backend = "sglang"'),
        ("critic.megatron.tensor_parallel=2", 'critic.backend = "torch"', 'critic.backend = "megatron"'),
    ],
)
def test_a_setting_of_a_backend_that_is_not_in_use_is_refused(setting: str, chosen: str, other: str) -> None:
    (error,) = errors(setting, config=PPO)
    assert error.startswith(setting.replace("=", " = "))
    assert f"no effect with {chosen}" in error
    assert f"set {other}" in error


def test_a_default_is_refused_only_where_it_is_spelled() -> None:
    config = load_config(DEMO)
    assert list(unused_settings(config)) == []
    (line,) = unused_settings(config, {"trainer.megatron.ranks"})
    assert line.startswith("trainer.megatron.ranks = 1 has no effect")


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_more_ranks_than_cores_need_a_device_that_says_so() -> None:
    ranks = usable_cores() + 1
    wide = ["trainer.backend=megatron", f"trainer.megatron.ranks={ranks}"]
    said = [error for error in errors(*wide) if "ranks" in error]
    (error,) = said
    assert f"trainer.megatron.ranks = {ranks}" in error
    assert f"no GPU and {ranks - 1} cores" in error
    assert 'trainer.device = "cpu"' in error
    found = examine(load_config(DEMO, [*wide, "trainer.device=cpu"]))
    assert not any("ranks" in error for error in found.errors)
    assert any(f"ranks = {ranks} on {ranks - 1} cores" in note for note in found.notes)
    assert not any("ranks" in error for error in examine(load_config(DEMO, wide), ["rollout"]).errors)


@pytest.mark.parametrize("names", [{"n_routed_experts": 8}, {"moe_num_experts": 4}, {"num_local_experts": 2}])
def test_experts_are_seen_under_any_name(names: dict[str, int]) -> None:
    assert has_experts({"hidden_size": 64, **names})


def test_a_model_without_experts_is_not_taken_for_one_with() -> None:
    assert not has_experts({"hidden_size": 64, "num_experts": 0, "expert_dropout": 0.5, "n_shared_experts": None})


@pytest.mark.usefixtures("asks_transformers_here")
def test_sglang_is_refused_for_experts_that_no_test_has_compared() -> None:
    deepseek = ["model.architecture.model_type=deepseek_v3", "model.architecture.n_routed_experts=8"]
    (error,) = errors(*URLS, *deepseek)
    assert "model of type deepseek_v3" in error
    assert 'use "transformers"' in error


@pytest.mark.usefixtures("asks_transformers_here")
def test_quantised_policy_is_refused_for_sglang() -> None:
    found = errors(*URLS, 'model.architecture.quantization_config={quant_method = "mxfp4"}')
    assert any("quantization_config (mxfp4)" in error and "folder of the model in bfloat16" in error for error in found)


def test_classes_of_sglang_are_found_by_their_definition(tmp_path: Path) -> None:
    models = tmp_path / "srt" / "models"
    models.mkdir(parents=True)
    (models / "phi.py").write_text("from torch import nn\n\nclass PhiForCausalLM(nn.Module):\n    pass\n")
    assert serves("PhiForCausalLM", tmp_path)
    assert not serves("PhiFor", tmp_path)
    assert not serves("Phi3ForCausalLM", tmp_path)


def memory(*overrides: str, config: Path = DEMO) -> dict[str, int]:
    """MiB a role besides its processes, for a model of 1 M parameters: bytes a parameter."""
    sizes = memory_of_roles(load_config(config, [*CPU, *overrides]), FACTS)
    return {role: (size % PROCESS_BYTES) // MIB for role, size in sizes.items()}


def test_memory_follows_the_precision_of_each_role() -> None:
    assert memory() == {"trainer": 16, "rollout": 8}
    half = ["trainer.precision=bfloat16", "weights.delta=off"]
    assert memory(*half) == {"trainer": 16, "rollout": 8}
    assert memory("trainer.precision=bfloat16") == {"trainer": 16 + 4, "rollout": 8}
    assert memory(*half, "trainer.backend=megatron")["trainer"] == 2 + 4 + 4 + 8
    assert memory("algorithm.kl.place=loss")["trainer"] == 16 + 4
    assert memory("rollout.device=cuda") == {"trainer": 16, "rollout": 0}
    assert memory("critic.device=cpu", config=PPO)["critic"] == 16


def test_copies_to_which_deltas_are_added_are_counted_once_a_node() -> None:
    def shared(*overrides: str) -> int:
        return shared_bytes(load_config(DEMO, [*CPU, "rollout.replicas=3", *overrides]), ("rollout",), FACTS) // MIB

    assert shared() == shared("trainer.precision=bfloat16", "weights.delta=off") == 0
    assert shared("trainer.precision=bfloat16") == 2 * 2
    scored = load_config(DEMO, [*CPU, "trainer.precision=bfloat16", "roles.actor_fwd.replicas=2"])
    assert [shared_bytes(scored, roles, FACTS) // MIB for roles in (("actor_fwd",), ("rollout", "actor_fwd"))] == [4, 4]


def test_memory_of_a_server_follows_its_precision() -> None:
    def rollout(*overrides: str) -> int:
        config = load_config(DEMO, [*CPU, "rollout.backend=sglang", "rollout.replicas=2", *overrides])
        sizes = [memory_of_roles(config, ModelFacts(n * MIB, 64, 14, "qwen3"))["rollout"] for n in (1, 2)]
        return (sizes[1] - sizes[0]) // MIB

    assert rollout() == 2 * 4
    assert rollout("trainer.precision=bfloat16") == 2 * 2
    assert rollout("trainer.precision=bfloat16", "rollout.sglang.dtype=float32") == 2 * 4
    assert rollout("rollout.sglang.urls=['http://127.0.0.1:1', 'http://127.0.0.1:2']") == 0


def test_server_stays_in_host_memory_where_others_move_to_the_disk() -> None:
    def sizes(backend: str, release: str, device: str) -> dict[str, int]:
        shared = ("placement.colocate=[['rollout','trainer']]", f"placement.release={release}")
        devices = (f"rollout.device={device}", f"trainer.device={device}", f"rollout.backend={backend}")
        grown = [
            memory_of_roles(load_config(DEMO, [*shared, *devices]), ModelFacts(n * MIB, 64, 14, "qwen3"))
            for n in (1, 2)
        ]
        return {role: (grown[1][role] - grown[0][role]) // MIB for role in ("trainer", "rollout")}

    assert sizes("sglang", "host", "cuda") == {"trainer": 16, "rollout": 4}
    assert sizes("sglang", "disk", "cuda") == {"trainer": 0, "rollout": 4}
    assert sizes("sglang", "disk", "cpu") == {"trainer": 16, "rollout": 4}
    assert sizes("transformers", "disk", "cuda") == {"trainer": 0, "rollout": 0}
    assert sizes("transformers", "disk", "cpu") == {"trainer": 16, "rollout": 0}


def test_ranks_share_the_optimizer() -> None:
    wide = ["trainer.backend=megatron", "trainer.megatron.ranks=4", "trainer.megatron.tensor_parallel=2"]
    assert memory(*wide)["trainer"] == 2 * 8 + 8
    assert memory(*wide, "trainer.megatron.distributed_optimizer=false")["trainer"] == 2 * 16


def test_ranks_of_torch_share_everything() -> None:
    assert memory("trainer.torch.ranks=4")["trainer"] == memory()["trainer"] == 16
    config = load_config(DEMO, [*CPU, "trainer.torch.ranks=4"])
    assert host_bytes(config, "trainer") == 5 * PROCESS_BYTES


def test_roles_of_other_machines_need_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "memory_of_machine", lambda: Memory(PROCESS_BYTES * 3, 0))
    config = load_config(DEMO, [*CPU, "rollout.replicas=4"])
    (error,) = examine(config).errors
    assert "on this machine need" in error
    assert "fewer replicas" in error
    assert examine(config, ["trainer", "prompts"]).errors == ()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["trainer.torch.ranks=2", "trainer.torch.offload=true", "trainer.recompute=full"])
def test_models_without_named_layers_are_refused_where_layers_are_needed(setting: str, tmp_path: Path) -> None:
    ctrl = {"model_type": "ctrl", "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(ctrl))
    with pytest.raises(ConfigError, match="names no layers of the model ctrl") as refused:
        list(TorchTrainingBackend().check(load_config(DEMO, [setting]), tmp_path))
    assert str(refused.value).startswith(setting.partition("=")[0])


def test_quantisation_that_an_update_of_weights_would_break_is_refused() -> None:
    for arguments in ("['--quantization', 'fp8']", "['--quantization=fp8']", "['--modelopt-quant', 'fp8']"):
        (error,) = errors(*URLS, f"rollout.sglang.arguments={arguments}")
        assert f"quantised by {arguments[2:].partition('=')[0].partition(chr(39))[0]};" in error
        assert 'use rollout.sglang.quantization = "fp8"' in error


SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = [f"model.architecture.{name}={size}" for name, size in (SHAPE | {"head_dim": 64}).items()]
FP8 = ["rollout.backend=sglang", "rollout.sglang.quantization=fp8"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.sglang.quantization=int4"], ("Marlin", 'use "fp8"')),
        (["model.architecture.hidden_size=192"], ("blocks of 128 do not divide hidden_size = 192", 'set it to "none"')),
        (
            ["rollout.sglang.tensor_parallel=2"],
            ("num_key_value_heads * head_dim = 64 on each of 2 ranks", "lower rollout.sglang.tensor_parallel"),
        ),
        (URLS[1:], ("needs servers that the run starts", "rollout.sglang.urls")),
        (["lora.rank=4"], ("set rollout.sglang.merge_adapter = true",)),
        (["model.architecture.model_type=glm4"], ("text models of the types", "not glm4")),
        (["rollout.device=cuda:0"], ("half precision", 'set rollout.sglang.dtype = "bfloat16"')),
    ],
)
def test_models_and_settings_that_servers_cannot_hold_in_float8_are_refused(
    overrides: list[str], said: tuple[str, ...]
) -> None:
    (error,) = (e for e in errors(*FP8, *WIDE, *overrides) if "rollout.sglang.quantization" in e)
    for part in said:
        assert part in error


def test_memory_of_quantised_weights_and_a_missing_correction_are_noted() -> None:
    half = [*FP8, *WIDE, "trainer.precision=bfloat16"]
    config = load_config(DEMO, half)
    assert layer_bytes(config) == 1 + 4 / 128**2, "a byte a number, and a scale of four bytes a block"
    facts = replace(FACTS, parameters=1 << 30, tables=1 << 28)
    plain = load_config(DEMO, [*half, "rollout.sglang.quantization=none"])
    # Embeddings, a quarter of the parameters, are not quantised.
    assert capacity.engine_bytes(plain, "rollout", facts) == 2 << 30
    assert capacity.engine_bytes(config, "rollout", facts) == int((0.25 * 2 + 0.75 * layer_bytes(config)) * (1 << 30))

    def notes(*overrides: str) -> list[str]:
        return [n for n in examine(load_config(DEMO, [*half, *overrides])).notes if "quantization" in n]

    (memory,) = notes()
    assert "published weights stay in the run's precision" in memory
    *_, missing = notes("algorithm.proximal=trainer")
    assert 'set algorithm.correction.kind = "tis"' in missing
    assert len(notes("algorithm.proximal=trainer", "algorithm.correction.kind=tis")) == 1


def test_a_loss_scale_without_float16_is_named() -> None:
    scale = "trainer.loss_scale.initial=8"
    (line,) = unused_settings(load_config(DEMO, [scale]))
    assert line.startswith("trainer.loss_scale.initial = 8.0 has no effect with trainer.precision")
    assert list(unused_settings(load_config(DEMO, [scale, "trainer.precision=float16"]))) == []


def test_external_servers_are_told_to_compute_logits_in_float32() -> None:
    notes = examine(load_config(DEMO, [*URLS, "model.fp32_lm_head=true"])).notes
    assert any("--enable-fp32-lm-head" in note for note in notes)


def test_entropies_of_an_engine_that_gives_none_are_refused() -> None:
    (said,) = (error for error in errors(*URLS, "record.entropy=true") if "record.entropy" in error)
    assert '"sglang" gives' in said
    assert 'set rollout.backend = "transformers"' in said
    (said,) = (error for error in errors("record.entropy=true", config=CLUSTER) if "record.entropy" in error)
    assert "simulated engines give" in said
