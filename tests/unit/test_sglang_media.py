"""Parts of the SGLang engine for media that need no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from transformers import AutoConfig

from broker.fields import TensorRef
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols import MediaItem, PromptMedia
from relax_actors.engines.sglang.launch_media import prepare_media
from relax_actors.engines.sglang.media_reference import MediaReferences, StoredMedia
from relax_actors.engines.sglang.server_models.fractions import pack, unpack
from relax_actors.engines.sglang.server_models.without_decoder import towers_of
from relax_actors.engines.sglang.weight_loaders import to_checkpoint_names
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.errors import ConfigError, EngineError
from relax_actors.media.families import FAMILIES
from relax_actors.media.family import Family, family_of
from tests.support.messages import assert_says
from tests.support.models import config_of
from tests.support.tiny_media_models import architecture_of


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_of(tmp_path_factory.mktemp("run"), architecture_of("qwen3_omni_moe_thinker")).model_path


@pytest.fixture(scope="module")
def family(omni: Path) -> Family:
    found = family_of(omni)
    assert found is not None
    return found


def stored(store: Path, kind: str, features: np.ndarray, grid: list[int], start: int, tokens: int) -> MediaItem:
    data = features.tobytes()
    digest = xxhash.xxh3_128_hexdigest(data)
    (store / digest).write_bytes(b"header" + data)
    place = TensorRef(digest, 6, len(data), features.dtype.name, features.shape, digest)
    return MediaItem(kind, features, np.array(grid, np.int32), start, tokens, reference=place)  # type: ignore[arg-type]


def test_a_reference_gives_the_server_what_the_role_media_stored(family: Family, tmp_path: Path) -> None:
    image, sound = np.arange(16 * 192, dtype=np.uint8).reshape(16, 192), np.ones((16, 60), np.float32)
    ids, tokens = family.ids, [5, 5]
    # Sound within a video: its placeholders are interleaved.
    tokens += [ids["video"], ids["audio"], ids["video"], ids["video"], ids["audio"], 5, *[ids["image"]] * 4, 5]
    items = (
        stored(tmp_path, "video", image[:12], [3, 2, 2], 2, 3),
        stored(tmp_path, "audio", sound, [55], 3, 2),
        stored(tmp_path, "image", image, [1, 4, 4], 8, 4),
    )
    positions = np.tile(np.arange(len(tokens), dtype=np.float32) + 0.25, (3, 1))
    references = MediaReferences(family, tmp_path)
    made = references.of(np.array(tokens, np.int32), PromptMedia(items, positions, -3.75))
    assert made.logit_bias == {str(token): -1e9 for token in family.barred}
    assert made.reference is not None
    found = StoredMedia.decode(made.reference)
    assert [one.kind for one in found.items] == ["video", "audio", "image"]
    assert [one.runs for one in found.items] == [((2, 2), (4, 5)), ((3, 3), (6, 6)), ((8, 11),)]
    assert [one.grid for one in found.items] == [(3, 2, 2), (55,), (1, 4, 4)]
    assert [one.padding for one in found.items] == [0, 55, 0]
    for one, item in zip(found.items, items, strict=True):
        np.testing.assert_array_equal(one.read(), item.features)
    np.testing.assert_array_equal(found.positions, positions)
    assert (found.delta, found.vision) == (-3.75, family.vision)
    assert family.vision is not None
    assert references.of(np.array([5], np.int32), PromptMedia((), positions[:, :1], 0.0)).reference is None


def test_media_that_no_server_could_read_are_refused(family: Family, tmp_path: Path) -> None:
    item = stored(tmp_path, "image", np.zeros((4, 192), np.uint8), [1, 2, 2], 1, 1)
    media = PromptMedia((item,), np.zeros((3, 2), np.int32), 0.0)
    references = MediaReferences(family, tmp_path)
    with pytest.raises(EngineError) as caught:
        references.of(np.array([5, 5], np.int32), media)
    assert_says(caught.value, "0 placeholders", "image", "1 tokens", "another model")
    with pytest.raises(ValueError, match=r"^'http://a/b\.png' is no reference"):
        StoredMedia.decode("http://a/b.png")


def test_packed_positions_keep_their_fractions_through_the_arithmetic_of_a_server() -> None:
    positions = torch.tensor([0.0, 3.0, 12.740001, 100_000.5], dtype=torch.float64)
    np.testing.assert_allclose(unpack(pack(positions)), positions, atol=5e-7)
    assert torch.equal(pack(torch.tensor([7, 8])), torch.tensor([7, 8]))
    # The position of a token after the prompt: its index and the difference, which is below 0.
    index, delta = torch.arange(50, 60), torch.tensor(-12.3, dtype=torch.float64)
    np.testing.assert_allclose(unpack(index + pack(delta)), index + delta, atol=5e-7)


def test_a_thinker_is_served_as_the_model_that_sglang_has_a_class_for(
    omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODEL_PACKAGE", "MM_PROCESSOR_PACKAGE"):
        monkeypatch.setenv(f"SGLANG_EXTERNAL_{name}", "")
    spec = FAMILIES["qwen3_omni_moe_thinker"]
    folder = prepare_media(omni, spec, deterministic=False)
    body = json.loads((folder / "config.json").read_text())
    assert (body["model_type"], body["architectures"]) == ("qwen3_omni_moe", [spec.sglang.architecture])
    assert body["thinker_config"] == json.loads((omni / "config.json").read_text())
    assert (folder / "tokenizer.json").read_text() == (omni / "tokenizer.json").read_text()
    tensors = tensors_of(build(omni))
    named = to_checkpoint_names(tensors, spec.sglang.prefixes)
    assert "thinker.model.layers.0.mlp.experts.3.down_proj.weight" in named
    assert all(name.startswith("thinker.") for name in named)
    assert sum(part.numel() for part in named.values()) == sum(part.numel() for part in tensors.values())


SERVED = ", ".join(name for name, spec in FAMILIES.items() if spec.sglang.architecture)
GEMMA3 = (
    'rollout.backend = "sglang" with a model of type gemma3: among models that see or hear only '
    f'{SERVED} are supported; use "transformers"'
)
EXTERNAL = (
    "rollout.sglang.urls: a server that the run does not start cannot read the media of prompts; leave it out, so that "
    "the run starts its servers"
)
PARALLEL = "rollout.sglang.tensor_parallel = 3 does not divide the model's num_attention_heads = 2; lower it"


@pytest.mark.parametrize(
    ("model_type", "settings", "said"),
    [
        ("gemma3", {}, GEMMA3),
        ("qwen3_vl", {"urls": ["http://127.0.0.1:1"]}, EXTERNAL),
        ("qwen3_omni_moe_thinker", {"tensor_parallel": 3}, PARALLEL),
    ],
)
def test_what_sglang_cannot_serve_is_refused_before_anything_starts(
    tmp_path: Path, model_type: str, settings: dict[str, Any], said: str
) -> None:
    rollout = {"backend": "sglang", "sglang": settings}
    config = config_of(tmp_path, architecture_of(model_type), rollout=rollout)
    with pytest.raises(ConfigError) as caught:
        list(inference_backend(config).check(config, config.model_path))
    assert str(caught.value) == said


def test_decoder_that_sglang_has_no_class_for_is_refused(tmp_path: Path) -> None:
    architecture = architecture_of("internvl")
    architecture["text_config"] = architecture["text_config"] | {"model_type": "llama"}
    config = config_of(tmp_path, architecture, rollout={"backend": "sglang"})
    with pytest.raises(ConfigError, match=r"text_config.model_type is 'llama': it serves qwen2, qwen3; use"):
        list(inference_backend(config).check(config, config.model_path))


@pytest.mark.parametrize("model_type", ["internvl", "glm4v", "qwen2_5_omni_thinker"])
def test_towers_keep_their_angles_in_float32(tmp_path: Path, model_type: str) -> None:
    config = config_of(tmp_path, architecture_of(model_type))
    towers = towers_of(AutoConfig.from_pretrained(config.model_path), torch.bfloat16)
    assert {p.dtype for p in towers.parameters()} == {torch.bfloat16}
    assert not [name for name, _ in towers.named_parameters() if "layers" in name and "audio_tower" not in name]
    expected = {name: b for name, b in build(config.model_path).named_buffers() if name.endswith("inv_freq")}
    found = [(name, b) for name, b in towers.named_buffers() if name.endswith("inv_freq")]
    assert bool(found) == (model_type != "internvl")
    for name, angles in found:
        assert angles.dtype is torch.float32
        torch.testing.assert_close(angles, next(b for n, b in expected.items() if n.endswith(name)), rtol=0, atol=0)
