"""Configs of multimodal models: completed from a TOML file, measured, and refused where their parts do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import validate
from relax_actors.data.model_folder import measure, prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.torch.architectures import check_architecture
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of
from tests.support.tiny_media_models import FAMILIES, architecture_of


def checked(folder: Path, architecture: dict[str, Any]) -> Path:
    """Prepare and check the model folder of an architecture, as `relax check` does."""
    tree = {
        "run": {"folder": str(folder)},
        "model": {"architecture": architecture, "tokenizer": {"alphabet": "0123456789#"}},
        "data": {"kind": "python", "function": "nothing"},
    }
    config = validate(tree, "test")
    prepare(config, config.model_path)
    check_architecture(config, config.model_path)
    return config.model_path


@pytest.mark.parametrize("model_type", FAMILIES)
def test_special_tokens_follow_the_alphabet_and_are_the_family_s_ids(tmp_path: Path, model_type: str) -> None:
    folder = checked(tmp_path, architecture_of(model_type))
    family, tokenizer, facts = family_of(folder), Tokenizer(folder), measure(folder)
    assert family is not None
    assert (family.model_type, facts.model_type, facts.context_length) == (model_type, model_type, 256)
    assert facts.vocabulary == tokenizer.size == 12 + len(family.barred)
    assert sorted(family.barred) == list(range(12, tokenizer.size))
    placeholder = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    texts = {token["id"]: token["content"] for token in placeholder}
    for name, number in family.ids.items():
        assert tokenizer.encode(f"1{texts[number]}2").tolist() == [1, number, 2], name
        assert tokenizer.decode([1, number, 2]) == "12"
    assert tokenizer.stop_ids == {10}


def test_parameters_of_the_towers_are_counted(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    folder = checked(tmp_path, architecture_of("qwen3_vl"))
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    exact = sum(p.numel() for p in model.parameters())
    assert measure(folder).parameters == pytest.approx(exact, rel=0.1)


def changed(model_type: str, section: str, **fields: Any) -> dict[str, Any]:
    found = architecture_of(model_type)
    return found | {section: found[section] | fields}


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sections": (
        changed("qwen3_vl", "text_config", rope_parameters=ROPE | {"mrope_section": [4, 2, 3]}),
        (
            "text_config.rope_parameters.mrope_section = [4, 2, 3] must be three numbers that add up to half of "
            "head_dim = 16"
        ),
    ),
    "no sections": (
        changed("qwen2_5_vl", "text_config", rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "text_config.rope_parameters has no mrope_section; add one, such as [2, 3, 3] for a head_dim of 16",
    ),
    "not interleaved": (
        changed("qwen3_vl", "text_config", rope_parameters=ROPE | {"mrope_interleaved": False}),
        "text_config.rope_parameters of qwen3_vl needs mrope_interleaved = true",
    ),
    "width of the vision tower": (
        changed("qwen3_vl", "vision_config", out_hidden_size=48),
        "vision_config.out_hidden_size = 48 is not text_config.hidden_size = 32; make them equal",
    ),
    "width of the sound tower": (
        changed("qwen3_omni_moe_thinker", "audio_config", output_dim=48),
        "audio_config.output_dim = 48 is not text_config.hidden_size = 32; make them equal",
    ),
    "positions": (
        changed("qwen3_vl", "vision_config", num_position_embeddings=15),
        "vision_config.num_position_embeddings = 15 is not a square number",
    ),
    "deepstack layer": (
        changed("qwen3_vl", "vision_config", deepstack_visual_indexes=[2]),
        "vision_config.deepstack_visual_indexes names layer 2; vision_config.depth is 2",
    ),
    "deepstack layers": (
        changed("qwen3_vl", "vision_config", depth=3, deepstack_visual_indexes=[0, 1, 2]),
        "vision_config.deepstack_visual_indexes has 3 entries for 2 layers of text_config; each needs a layer",
    ),
    "window": (
        changed("qwen3_omni_moe_thinker", "audio_config", n_window=25),
        "audio_config.n_window = 25: the sound tower of qwen3_omni_moe_thinker works with 50 only",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    architecture, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, architecture)
    assert str(caught.value) == f"model.architecture: {message}"


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, architecture_of("qwen3_vl") | {"model_type": "llava"})
    message = str(caught.value)
    assert message.startswith("model.architecture: ")
    assert "'llava'" in message
    assert all(name in message for name in FAMILIES)


def test_an_architecture_is_that_of_the_thinker(tmp_path: Path) -> None:
    whole = {"model_type": "qwen2_5_omni", "thinker_config": architecture_of("qwen2_5_omni_thinker")}
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, whole)
    assert "'qwen2_5_omni' are not supported" in str(caught.value)
    assert "qwen2_5_omni_thinker" in str(caught.value)
