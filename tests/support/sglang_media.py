"""A real SGLang server of a multimodal family, with prompts whose features lie in a store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from broker.fields import TensorRef
from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols import Generation, GenerationRequest, PromptMedia, TrainSample
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.media_reference import MediaReferences
from relax_actors.engines.torch.model import build
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.media.family import family_of
from relax_actors.messages.experts import MISSING
from tests.support.batches import silent
from tests.support.models import publish, random_weights
from tests.support.sglang_servers import Kept, config_of, engine_of
from tests.support.tiny_media_models import MediaPrompts, architecture_of, prompts_of

SAMPLES, TOKENS, TEMPERATURE = 3, 12, 0.8


class ServedModel:
    """A server of one family, prompts with media, and weights that want to sample placeholders.

    Models with experts record the chosen ones. A name can hold the type of another decoder behind that of the model,
    whose head is its embeddings.
    """

    def __init__(self, folder: Path, name: str) -> None:
        model_type, _, decoder = name.partition(" ")
        self.folder, self.store = folder, folder / "store"
        self.store.mkdir()
        has_experts, architecture = "moe" in model_type, architecture_of(model_type)
        if decoder:
            text = architecture["text_config"] | {"model_type": decoder, "tie_word_embeddings": True}
            architecture |= {"text_config": text, "tie_word_embeddings": True}
        if model_type == "qwen3_vl_moe":
            # Two features added to layers: SGLang's own class always adds three.
            vision = architecture["vision_config"] | {"deepstack_visual_indexes": [0, 2]}
            architecture["vision_config"] = vision
        self.config = config_of(
            folder,
            architecture,
            run={"deterministic": False},
            rollout={"temperature": TEMPERATURE},
            trainer={"router_replay": has_experts},
        )
        self.moe = measure(self.config.model_path).moe if has_experts else None
        family = family_of(self.config.model_path)
        assert family is not None
        self.family = family
        model = build(self.config.model_path)
        prompts = prompts_of(model, family)
        if "video" in family.kinds and not family.spec.timestamp:
            # Two frames, in Qwen3-Omni the second between two whole positions.
            sound = ["audio"] if family.position_dtype == "float32" else []
            prompts.append(MediaPrompts(model, family, 4).make("video", *sound, seconds=0.7))
            assert prompts[-1][1].items[0].grid[0] == 2
        self.requests = [
            GenerationRequest(
                tokens, seed, SAMPLES, TEMPERATURE, 1.0, TOKENS - seed, frozenset(), media=self.stored(media)
            )
            for seed, (tokens, media) in enumerate(prompts)
        ]
        self.kept = Kept(self.config)

    def stored(self, media: PromptMedia) -> PromptMedia:
        """Write features to the store, as the role `media` does."""
        items = []
        for item in media.items:
            data = np.ascontiguousarray(item.features)
            digest = xxhash.xxh3_128_hexdigest(data)
            (self.store / digest).write_bytes(b"header" + data.tobytes())
            place = TensorRef(digest, 6, data.nbytes, data.dtype.name, data.shape, digest)
            items.append(replace(item, reference=place))
        return replace(media, items=tuple(items))

    def engine(self) -> AbstractContextManager[SglangEngine]:
        """Engine of one incarnation of an actor."""
        media = MediaReferences(self.family, self.store)
        prefixes = self.family.spec.sglang.prefixes
        # The first pass through towers takes long on a loaded machine.
        return engine_of(self.kept, media=media, prefixes=prefixes, moe=self.moe, stall=300.0)

    def weights(self, scale: float) -> dict[str, Tensor]:
        """Draw weights whose head prefers the family's special tokens to all others."""
        found = random_weights(self.config, scale)
        heads = ("lm_head.weight", "model.language_model.embed_tokens.weight")
        found[next(name for name in heads if name in found)][list(self.family.barred)] *= 20
        return found

    def publish(self, scale: float) -> tuple[str, list[Path]]:
        """Write weights as a trainer does; return their fingerprint and files."""
        return publish(self.weights(scale), self.folder / f"weights-{scale}.safetensors")

    def check(
        self,
        requests: Sequence[GenerationRequest],
        groups: list[list[Generation]],
        scales: dict[int, float],
        rounding: float = 1e-5,
    ) -> None:
        """Compare samples with what a scorer computes with the weights that wrote each token.

        Args:
            requests: of the samples.
            groups: samples of each request.
            scales: of the weights, by version.
            rounding: greatest absolute difference of log-probs.
        """
        for version, scale in scales.items():
            scorer = TorchScorer(self.config)
            scorer.load(1, *self.publish(scale))
            for request, group in zip(requests, groups, strict=True):
                assert len(group) == request.samples
                samples = [
                    TrainSample.of_completion(
                        request.tokens, made.tokens, media=request.media, routed_experts=experts_of(made, version)
                    )
                    for made in group
                ]
                for sample, scored, made in zip(samples, scorer.score(samples, silent), group, strict=True):
                    assert len(made.tokens) == request.max_tokens
                    assert not {*made.tokens.tolist()} & {*self.family.barred}
                    assert (made.routed_experts is None) == (self.moe is None)
                    wrote = made.versions == version
                    np.testing.assert_allclose(made.logprobs[wrote], scored[sample.loss_mask][wrote], atol=rounding)


def experts_of(made: Generation, version: int) -> NDArray[Any] | None:
    """Return the recorded experts of a sample; -1 for older weights, as those of its prompt are of the last ones."""
    if made.routed_experts is None or made.versions[-1] == version:
        return made.routed_experts
    return np.full_like(made.routed_experts, MISSING)
