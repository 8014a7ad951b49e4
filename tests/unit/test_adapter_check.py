"""What `relax check` says of [lora], from the files of the model alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from relax_actors.checks.examine import examine
from relax_actors.config import Config
from relax_actors.data.adapter import AdapterForm, match_saved, match_targets
from relax_actors.data.adapter_check import check_adapter, expert_layers
from relax_actors.engines.backends import check_adapters, footprints
from relax_actors.engines.sglang.adapter_form import check_served
from relax_actors.errors import ConfigError
from tests.support.adapters import adapter_config, base_folder
from tests.support.models import QWEN3, config_of, qwen3_moe
from tests.support.text_families import SHAPE, TORCH

LAYERS = [
    f"model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]
LINEAR = [*LAYERS, "lm_head"]
MODULES = [*LINEAR, "model.embed_tokens", "model.norm"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("model"))


def test_targets_are_full_names_last_parts_and_patterns() -> None:
    assert match_targets(LINEAR, MODULES, "all-linear") == sorted(LAYERS)
    assert match_targets(LINEAR, MODULES, ["q_proj", "model.layers.1.mlp.up_proj"]) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert match_targets(LINEAR, MODULES, ["model.layers.1.*"]) == sorted(LAYERS[3:])
    assert match_targets(LINEAR, MODULES, ["self_attn.v_proj"]) == [LAYERS[1], LAYERS[4]]
    assert match_saved(MODULES, ["norm"]) == ["model.norm"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("qproj", r"'qproj' matches no layer of the model; near it: q_proj"),
        ("model.layers.7.mlp.*", r"matches no layer of the model; near it: .*model.layers.0.mlp.up_proj"),
        ("proj", r"'proj' matches no layer"),
        ("embed_tokens", r"matches model.embed_tokens, which is no linear layer; name it in lora.modules_to_save"),
        ("*", r"matches the output head lm_head, which has no adapter; name it in lora.modules_to_save"),
    ],
)
def test_target_that_is_no_layer_is_refused_with_the_names_near_it(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        match_targets(LINEAR, MODULES, ["q_proj", target])


def test_module_that_does_not_exist_is_refused_with_the_names_near_it() -> None:
    with pytest.raises(ConfigError, match=r"lora.modules_to_save: 'nrm' matches no module.*near it: norm"):
        match_saved(MODULES, ["nrm"])


def test_size_of_the_adapter_is_noted(tmp_path: Path, base: Path) -> None:
    (note,) = check_adapter(adapter_config(tmp_path, base, {"rank": 2, "targets": ["q_proj"]}), base)
    # Rank 2, from 32 to 32 numbers, in two layers.
    assert "2 of 14 linear layers, 256 parameters" in note


def refusal(config: Config, base: Path) -> str:
    """The text of the refusal."""
    with pytest.raises(ConfigError) as found:
        list(check_adapter(config, base))
    return str(found.value)


def test_settings_that_an_adapter_leaves_without_meaning_are_refused(tmp_path: Path, base: Path) -> None:
    warm = adapter_config(tmp_path, base, trainer={"warm_start": {"steps": 2}})
    assert "trainer.warm_start trains the model before version 0" in refusal(warm, base)
    frozen: dict[str, Any] = {"trainer": {"freeze": ["model.embed_tokens.*"]}}
    assert "leave trainer.freeze out" in refusal(adapter_config(tmp_path, base, **frozen), base)
    tied = adapter_config(tmp_path, base, {"modules_to_save": ["embed_tokens"]})
    assert "embed_tokens shares its weights" in refusal(tied, base)


def test_model_of_another_kind_of_layers_is_refused_by_name(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    folder = base_folder(tmp_path, fields)
    assert "type gpt2, whose layers are Conv1D" in refusal(adapter_config(tmp_path / "run", folder), folder)


def test_base_without_weights_and_a_quantised_one_are_refused(tmp_path: Path, base: Path) -> None:
    random = config_of(tmp_path / "random", QWEN3, lora={"rank": 2})
    assert "this run's model starts from random weights" in refusal(random, random.model_path)
    fields = json.loads((base / "config.json").read_text())
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(base / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    found = refusal(adapter_config(tmp_path, folder), folder)
    assert "quantised weights (bitsandbytes)" in found
    assert "QLoRA" in found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"peft_type": "LOHA"}, "type LOHA"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4', which also changed the weights"),
        ({"init_lora_weights": "gaussian"}, "has no adapter_model.safetensors"),
        ({"r": 8}, "lora.rank = 4, but the adapter"),
        ({}, "has no adapter_model.safetensors"),
    ],
)
def test_folder_of_an_adapter_that_cannot_be_trained_is_refused(
    tmp_path: Path, base: Path, body: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(plain | body))
    if body.get("r") == 8:
        (folder / "adapter_model.safetensors").symlink_to(base / "model.safetensors")
    assert message in refusal(adapter_config(tmp_path, base, {"path": str(folder)}), base)


DATA = {"kind": "python", "function": "tests.support.tiny_tasks.make", "size": 8}
EXPERTS = {"targets": ["all-linear", "experts.gate_up_proj", "experts.down_proj"]}
MERGE = "set rollout.sglang.merge_adapter = true"


@pytest.mark.usefixtures("asks_transformers_here")
@pytest.mark.parametrize(
    ("architecture", "lora", "sglang", "message"),
    [
        (QWEN3, {"modules_to_save": ["norm"]}, {}, f"modules_to_save = ['norm']: SGLang's adapters .*; {MERGE}"),
        (qwen3_moe(QWEN3), EXPERTS, {}, f"change only q_proj, .* in a model with experts; {MERGE}"),
        (qwen3_moe(QWEN3), {"targets": ["v_proj"]}, {}, f"files hold experts joined .*; {MERGE}"),
        (TORCH["glm4"], {}, {}, f"layers ['gate_up_proj']: SGLang's adapters change only q_proj, .*; {MERGE}"),
        (QWEN3, {}, {"weights": "shared"}, f'weights = "shared" is for full sets of weights, .*; .*{MERGE}'),
    ],
)
def test_adapter_that_sglang_cannot_serve_is_refused_with_the_setting_that_merges_it(
    tmp_path: Path, architecture: dict[str, Any], lora: dict[str, Any], sglang: dict[str, Any], message: str
) -> None:
    urls = {"urls": ["http://127.0.0.1:1"]} if sglang == {} else {}
    folder = base_folder(tmp_path, architecture)
    pattern = message.replace("[", r"\[").replace("]", r"\]")

    def refusals(**more: Any) -> list[str]:
        rollout = {"backend": "sglang", "sglang": urls | sglang | more}
        config = adapter_config(tmp_path / "run", folder, lora, data=DATA, rollout=rollout)
        return [error for error in examine(config).errors if re.search(pattern, error)]

    assert len(refusals()) == 1
    assert not refusals(merge_adapter=True)


def test_layer_that_sglang_joins_with_a_missing_layer_is_refused(tmp_path: Path) -> None:
    folder = base_folder(tmp_path, SHAPE | {"model_type": "arcee"})  # whose feed-forward layers have no gate
    form = AdapterForm(4, 8.0, rslora=False, dropout=0.0, targets=("q_proj", "up_proj"), saved=())
    message = rf"layers\.0\.mlp\.up_proj: SGLang joins it with .*\.0\.mlp\.gate_proj, which the model lacks; {MERGE}"
    with pytest.raises(ConfigError, match=message):
        check_served(form, folder, has_experts=False)


def test_check_names_the_arguments_of_external_servers_for_an_adapter(tmp_path: Path, base: Path) -> None:
    rollout = {"backend": "sglang", "sglang": {"urls": ["http://127.0.0.1:1"]}}
    config = adapter_config(tmp_path, base, {"targets": ["v_proj"]}, data=DATA, rollout=rollout)
    (note,) = [note for note in examine(config).notes if "external servers" in note]
    assert "--enable-lora" in note
    assert "--max-lora-rank 4" in note
    assert note.endswith("--lora-target-modules k_proj q_proj v_proj"), "SGLang joins the three"


def test_backend_without_adapters_is_refused_by_name(tmp_path: Path, base: Path) -> None:
    config = adapter_config(tmp_path, base)
    for setting, remedy in (
        ("critic.backend", '"torch" or "megatron"'),
        ("rollout.backend", '"transformers" or "sglang"'),
    ):
        message = f'{setting} = "own.Engine" computes with the weights of whole models; set it to {remedy}, or remove'
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_adapters(config, object(), setting, "own.Engine")


@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_reference_computes_with_the_adapter(tmp_path: Path, base: Path, name: str) -> None:
    if name == "megatron":
        pytest.importorskip("megatron.core", reason="the check refuses megatron where it is not installed")
    roles, algorithm = {"reference": {"backend": name}}, {"kl": {"place": "loss", "coefficient": 0.1}}
    config = adapter_config(tmp_path, base, data=DATA, roles=roles, algorithm=algorithm)
    assert not any("roles.reference.backend" in error for error in examine(config).errors)


def test_offloaded_base_is_counted_in_float32(tmp_path: Path, base: Path) -> None:
    def bytes_of(**torch: Any) -> float:
        trainer = {"precision": "bfloat16", "torch": torch}
        return footprints(adapter_config(tmp_path, base, trainer=trainer))["trainer"].parameter_bytes

    assert bytes_of(offload=True) == bytes_of() + 2


def test_experts_have_adapters_by_their_own_names_alone(tmp_path: Path) -> None:
    folder = base_folder(tmp_path, qwen3_moe(QWEN3))
    (note,) = check_adapter(adapter_config(tmp_path / "run", folder), folder)
    assert "8 of 9 linear layers, none of experts" in note  # without the output head
    named = {"rank": 2, "targets": ["q_proj", "*.layers.0.*.experts.*"]}
    (note,) = check_adapter(adapter_config(tmp_path / "run", folder, named), folder)
    # Two projections of queries; of each of four experts gate with up, from 32 to 64 numbers, and down, from 32 to 32.
    size = 2 * (2 * (32 + 32) + 4 * (32 + 64 + 32 + 32))
    assert f"2 of 9 linear layers and 2 of 4 tensors of experts, {size} parameters" in note
    dropped = adapter_config(tmp_path / "run", folder, named | {"dropout": 0.1})
    assert "PEFT drops no inputs of experts" in refusal(dropped, folder)
    for setting in ("targets", "modules_to_save"):
        for name in ("experts.0.up_proj", "experts", "model.layers.1.mlp.e*"):
            config = adapter_config(tmp_path / "run", folder, {setting: [name]})
            message = f"lora.{setting}: '{name}' names "
            assert refusal(config, folder).startswith(message)
            assert '"experts.gate_up_proj" and "experts.down_proj"' in refusal(config, folder)


def test_experts_of_files_are_those_of_transformers_unless_transposed_or_with_biases() -> None:
    def apart(parts: str) -> dict[str, list[int]]:
        shapes = {"gate": [16, 32], "up": [16, 32], "down": [32, 16], "w1": [16, 32]}
        return {f"model.layers.3.mlp.experts.{n}.{p}_proj.weight": shapes[p] for n in range(11) for p in parts.split()}

    joined = {
        "model.layers.3.mlp.experts.gate_up_proj": [11, 32, 32],
        "model.layers.3.mlp.experts.down_proj": [11, 32, 16],
    }
    assert expert_layers(apart("gate up down")) == expert_layers(joined) == joined
    assert expert_layers(apart("up down")) == expert_layers(apart("w1")) == {}
    assert expert_layers(joined | {"model.layers.3.mlp.experts.gate_up_proj_bias": [11, 32]}) == {}
    llama4 = {
        "model.layers.3.mlp.experts.gate_up_proj": [11, 24, 32],
        "model.layers.3.mlp.experts.down_proj": [11, 16, 24],
    }
    assert expert_layers(llama4) == {}
