"""A family that is declared in one place and registered is known to preprocessing, checks and engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.megatron import architecture
from relax_actors.engines.sglang.launch_media import served_family
from relax_actors.engines.torch.architectures import check_architecture
from relax_actors.errors import ConfigError
from relax_actors.media import Features, expand
from relax_actors.media.families import FAMILIES, FAMILIES_BY_TYPE, FamilySpec
from tests.support.tiny_media_models import architecture_of

TOKENS = {"vision_start": "[eye]", "vision_end": "[/eye]", "image": "[picture]", "video": "[clip]"}


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Iterator[FamilySpec]:
    """A family with tokens of its own, timestamps, and positions that follow the largest one of an image."""
    old = FAMILIES["qwen2_5_vl"]
    positions = replace(old.positions, after_side=False)
    new = replace(old, model_type="new_vl", tokens=TOKENS, timestamp="at {seconds:.0f}", positions=positions)
    monkeypatch.setitem(FAMILIES, "new_vl", new)
    monkeypatch.setitem(FAMILIES_BY_TYPE, "new_vl", new)
    return new


def config_of(folder: Path) -> Config:
    tree = {
        "run": {"folder": str(folder)},
        "model": {
            "architecture": architecture_of("qwen2_5_vl") | {"model_type": "new_vl"},
            "tokenizer": {"alphabet": "0123456789at #"},
        },
        "data": {"kind": "python", "function": "nothing"},
    }
    return validate(tree, "test")


def test_registered_family_is_known_everywhere(spec: FamilySpec, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    prepare(config, config.model_path)
    check_architecture(config, config.model_path)
    architecture.check(architecture.decoder_fields(json.loads((config.model_path / "config.json").read_text())))
    family = served_family(config.model_path)
    assert family is not None
    assert (family.spec, family.kinds) == (spec, ("image", "video"))
    inner = Tokenizer(config.model_path).inner
    assert family.marker("image", inner) == "[eye][picture][/eye]"

    grid, times = np.array([2, 2, 4], np.int32), (0.0, 1.0)
    video = Features("video", np.zeros((16, 384), np.uint8), grid, seconds_per_grid=1.0, timestamps=times)
    whole = expand(np.array(inner.encode("1[clip]2").ids, np.int32), [video], family, inner)
    shown = inner.decode(whole.tokens.tolist(), skip_special_tokens=False)
    assert shown == "1at 0[eye][clip][clip][/eye]at 1[eye][clip][clip][/eye]2"
    assert whole.delta == 0


def test_family_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="'new_vl' are not supported"):
        prepare(config, config.model_path)
