"""The files of a model from [model.architecture]: its processor in transformers makes what the role `media` makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from relax_actors.config import load_config
from relax_actors.config.media import MediaSection
from relax_actors.data.model_folder import prepare
from relax_actors.media import Features, expand, process
from relax_actors.media.family import family_of
from relax_actors.media.normalise import pixel_values
from tests.support.media_files import image_file, picture, tone, wav_file

pytest.importorskip("torchvision", reason="the video processors of transformers need torchvision: make sglang")
EXAMPLES = Path(__file__).parents[2] / "examples" / "omni"


@pytest.mark.parametrize("task", ["image", "sound", "omni"])
def test_processor_of_a_tiny_model_equals_the_role_media(task: str, tmp_path: Path) -> None:
    config = load_config(EXAMPLES / f"{task}.toml")
    prepare(config, tmp_path)
    family, chosen = family_of(tmp_path), config.media
    assert family is not None
    assert chosen is not None
    settings = MediaSection(image=chosen.image)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text, features, media = "1", list[Features](), {}
    if task != "sound":
        text += family.marker("image", inner)
        features += process(image_file(picture(40, 56)), "image", family, settings)
        media["images"] = [picture(40, 56)]
    if task != "image":
        text += family.marker("audio", inner)
        samples = tone(0.5)
        features += process(wav_file(samples), "audio", family, settings)
        media["audio"] = [np.round(samples * 32767).astype(np.int16).astype(np.float32) / 32768]
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    batch = processor(text=[text], return_tensors="pt", **media)
    expanded = expand(np.array(inner.encode(text).ids, np.int32), features, family, inner)
    assert expanded.tokens.tolist() == batch["input_ids"][0].tolist()
    for each in features:
        if each.kind == "image":
            assert family.vision is not None
            assert np.array_equal(
                pixel_values(torch.from_numpy(each.array), family.vision), batch["pixel_values"].numpy()
            )
        else:
            valid = batch["feature_attention_mask"][0].bool()
            np.testing.assert_allclose(each.array, batch["input_features"][0][:, valid].numpy(), atol=1e-6)
