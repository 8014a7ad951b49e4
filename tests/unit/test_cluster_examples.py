"""The files of examples/cluster fit on two nodes of eight GPUs, with models of the full shape and no weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_actors.checks import examine
from relax_actors.checks.cluster import place_on_nodes, placement_lines
from relax_actors.config import load_config
from relax_actors.devices.cluster import simulated_nodes
from tests.support.cluster_examples import FOLDER, MODELS, write_inputs

SLOW = ("qwen3_vl_8b_geometry", "qwen2_audio_7b_spoken")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS])
def test_example_fits_on_two_nodes_of_eight(name: str, tmp_path: Path) -> None:
    config = load_config(FOLDER / f"{name}.toml", write_inputs(tmp_path, name))
    nodes = simulated_nodes("2x8x80GiB")
    findings = examine(config, nodes=nodes)
    assert findings.errors == ()
    assert findings.facts is not None
    lines = list(placement_lines(config, nodes, place_on_nodes(config, nodes, findings.facts)))
    assert all("0 idle GPUs" in line for line in lines[-2:])
    assert sum(line.startswith("trainer_rank") for line in lines) == 4


@pytest.mark.parametrize("name", MODELS)
def test_example_is_placed_by_the_shape_of_its_model_alone(name: str) -> None:
    config, nodes = load_config(FOLDER / f"{name}.toml"), simulated_nodes("2x8x80GiB")
    findings = examine(config, nodes=nodes, shape=FOLDER / "shapes" / name)
    assert findings.errors == ()
    assert findings.facts is not None
    assert any("not checked" in note for note in findings.notes)
    assert not place_on_nodes(config, nodes, findings.facts).problems


@pytest.mark.parametrize(
    "settings", [(), ("rollout.sglang.merge_adapter=true", "lora.modules_to_save=['embed_tokens']")]
)
def test_adapter_of_a_model_that_is_only_a_shape_is_not_compared_with_files(settings: tuple[str, ...]) -> None:
    config = load_config(FOLDER / "qwen3_4b_async.toml", ["lora.rank=8", *settings])
    shape = FOLDER / "shapes" / "qwen3_4b_async"
    assert examine(config, nodes=simulated_nodes("2x8x80GiB"), shape=shape).errors == ()
    wrong = config.model_copy(update={"trainer": config.trainer.model_copy(update={"freeze": ["lm_head"]})})
    (error,) = examine(wrong, nodes=simulated_nodes("2x8x80GiB"), shape=shape).errors
    assert "trainer.freeze" in error


def test_shape_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    findings = examine(load_config(FOLDER / "qwen3_4b_async.toml"), nodes=simulated_nodes("2x8"), shape=tmp_path)
    assert any("--shape" in error and "config.json" in error for error in findings.errors)
