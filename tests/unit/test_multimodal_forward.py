"""Packed sequences with media have the log-probs and gradients of transformers' own forward, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.protocols import PromptMedia, TrainSample
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.model import build
from relax_actors.engines.torch.multimodal import decoder_of
from relax_actors.engines.torch.packing import is_recurrent
from relax_actors.engines.torch.towers import encode
from relax_actors.media.family import Family, family_of
from tests.support.models import config_of, fill_zeros
from tests.support.tiny_media_models import FAMILIES, MediaPrompts, architecture_of, plain_logits, prompts_of

TEMPERATURE = 0.7


class Tiny:
    """A model for transformers' own forward, the same model for packed sequences, and samples with media."""

    def __init__(self, folder: Path, model_type: str) -> None:
        path = config_of(folder, architecture_of(model_type)).model_path
        family = family_of(path)
        assert family is not None
        self.family: Family = family
        self.alone, self.packed = (_large(build(path, seed=3)) for _ in range(2))
        self.alone.train(mode=False)
        self.is_recurrent = is_recurrent(decoder_of(self.alone))
        self.forward = Forward(torch.device("cpu"), torch.float32, TEMPERATURE, family)
        self.forward.prepare(self.packed)
        random = np.random.default_rng(1)
        self.samples = [
            TrainSample.of_completion(tokens, random.integers(0, 10, 4 + n).astype(np.int32), media=media, row=row)
            for row, (tokens, media) in enumerate(prompts_of(self.alone, family))
            for n in range(2)
        ]

    def plain(self, sample: TrainSample) -> Tensor:
        """Return the log-probs of the trained tokens by transformers' own forward."""
        assert sample.media is not None
        logits = plain_logits(self.alone, self.family, sample.token_ids, sample.media) / TEMPERATURE
        tokens = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
        found = logits[:-1].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return found[torch.from_numpy(sample.loss_mask[1:])]

    def packed_logprobs(self, samples: Sequence[TrainSample]) -> Tensor:
        """Return the log-probs of the trained tokens of all samples, in one micro-batch if the layers allow it."""
        plans, found = self.forward.plan(samples, 1 << 20), dict[int, Tensor]()
        assert len(plans) == (len(samples) if self.is_recurrent else 1)
        for plan in plans:
            batch = self.forward.micro_batch(samples, plan)
            rows = self.forward.logprobs(self.packed, batch)
            found |= {index: row[mask] for index, row, mask in zip(plan.indices, rows, batch.mask, strict=True)}
        return torch.cat([found[index] for index in range(len(samples))])


def _large(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge the weights, so that distributions are far from uniform."""
    fill_zeros(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


ENTRIES = ("patch_embed", "patch_embeddings", "audio_tower.conv1")
"""Modules of towers that read media first."""


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("run"), request.param)


def test_packed_log_probs_and_gradients_equal_those_of_each_row_alone(tiny: Tiny) -> None:
    plain = torch.cat([tiny.plain(sample) for sample in tiny.samples])
    assert any(tiny.forward.plan(tiny.samples, 1 << 20)[0].shared) != tiny.is_recurrent
    packed = tiny.packed_logprobs(tiny.samples)
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(plain))
    for model, found in ((tiny.alone, plain), (tiny.packed, packed)):
        model.zero_grad()
        torch.autograd.backward((found * weights).sum())
    gradients = {name: p.grad for name, p in tiny.packed.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in tiny.alone.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5 * largest, rtol=1e-4, msg=name)
    towers = [name for name in gradients if any(tower in name for tower in ("visual", "_tower"))]
    assert towers
    assert gradients.keys() == {name for name, p in tiny.alone.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_tokens_of_an_image_behind_a_shared_prefix_attend_to_each_other(tiny: Tiny) -> None:
    said, make, samples = tiny.samples[0], MediaPrompts(tiny.alone, tiny.family, 5), [tiny.samples[0]]
    assert said.media is not None
    for _ in range(2):
        shown, seen = make.make("image", text=2)
        first = said.media.positions_of(len(said) + 1)[0, -1]
        media = said.media.extended(len(said), seen.positions + first, seen.items)
        before = np.concatenate([said.token_ids, shown])
        samples.append(TrainSample.of_completion(before, said.token_ids[:4], media=media))
    assert max(tiny.forward.plan(samples, 1 << 20)[0].shared) >= len(said)
    plain = torch.cat([tiny.plain(sample) for sample in samples])
    torch.testing.assert_close(tiny.packed_logprobs(samples), plain, atol=1e-5, rtol=0)
    (tower,) = [m for name, m in tiny.alone.named_modules() if name.endswith("multi_modal_projector")]
    with tower.register_forward_hook(lambda *given: given[-1].roll(1, 1)):
        rolled = torch.cat([tiny.plain(sample) for sample in samples])
    assert float((rolled - plain).detach().abs().max()) > 1e-3  # what an image shows, and where, matters


def test_text_alone_needs_no_media_object(tiny: Tiny) -> None:
    plain = [sample for sample in tiny.samples if sample.media is not None and not sample.media.items]
    without = [replace(sample, media=None) for sample in plain]
    torch.testing.assert_close(tiny.packed_logprobs(without), tiny.packed_logprobs(plain), atol=0, rtol=0)


def test_towers_read_the_media_of_a_row_once_in_a_micro_batch(tiny: Tiny) -> None:
    row = [sample for sample in tiny.samples if sample.row == 1]
    read: list[int] = []
    towers = [m for name, m in tiny.packed.named_modules() if name.endswith(ENTRIES)]
    hooks = [tower.register_forward_hook(lambda _, given, __: read.append(len(given[0]))) for tower in towers]
    tiny.packed_logprobs(row[:1])
    once = list(read)
    read.clear()
    tiny.packed_logprobs(row * 3)
    for hook in hooks:
        hook.remove()
    assert read == once * (6 if tiny.is_recurrent else 1)


def test_towers_compute_where_their_weights_are(tiny: Tiny) -> None:
    media = [sample.media for sample in tiny.samples if sample.media is not None and sample.media.items]
    expected = encode(tiny.alone, tiny.family, media).embeddings
    model = deepcopy(tiny.alone)
    decoder_of(model).to("meta")  # type: ignore[arg-type]  # a decorator hides its types
    model.lm_head.to("meta")
    model.register_parameter("first", torch.nn.Parameter(torch.empty(1, device="meta")))
    assert model.device.type == "meta"
    torch.testing.assert_close(encode(model, tiny.family, media).embeddings, expected)


def test_media_of_another_prompt_are_refused(tiny: Tiny) -> None:
    first, second = tiny.samples[0], tiny.samples[2]
    assert second.media is not None
    kind = second.media.items[0].kind
    wrong = replace(first, media=PromptMedia(second.media.items[:1], first.media.positions, 0))  # type: ignore[union-attr]
    had = int((first.token_ids == tiny.family.ids[kind]).sum())
    if had == wrong.media.items[0].tokens:  # type: ignore[union-attr]
        wrong = replace(wrong, media=replace(wrong.media, items=wrong.media.items * 2))  # type: ignore[union-attr, type-var]
    with pytest.raises(ValueError, match=f"a prompt has {had} placeholders of kind {kind}, its . media have .*"):
        tiny.packed_logprobs([wrong])
