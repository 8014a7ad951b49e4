"""Tiny models for tests: architectures, the configuration of a run that trains one, and random weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from relax_actors.config import Config, load_config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import Generation, GenerationRequest, StopStrings
from relax_actors.engines.torch.model import build, copy_into, tensors_of
from relax_actors.weights import files as weights
from tests.support.running import TINY

ALPHABET = "0123456789>#"
STOP = ALPHABET.index("#")
VOCABULARY = len(ALPHABET) + 1
"""The characters and the unknown token."""

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def qwen3_moe(dense: dict[str, Any], experts: int = 4) -> dict[str, Any]:
    """Give a dense architecture experts, of which two compute each token."""
    return dense | {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }


def config_of(folder: Path, architecture: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Configure a run in `folder` and prepare its model folder, which holds no weights.

    Args:
        folder: of the run.
        architecture: `model.architecture`.
        sections: settings that are added to the defaults, by section.
    """
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "folder": str(folder), "seed": 5, "steps": 10},
        "model": {"architecture": architecture, "tokenizer": {"alphabet": ALPHABET}},
        "data": {"kind": "python", "function": "nothing"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = validate(tree, "test")
    prepare(config, config.model_path)
    return config


def request_of(text: str, seed: int, **fields: Any) -> GenerationRequest:
    """Ask for samples of a prompt in `ALPHABET`: four of at most nine tokens, unless `fields` says otherwise."""
    tokens = np.array([ALPHABET.index(c) for c in text], np.int32)
    settings = {"samples": 4, "temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "stop_ids": frozenset([STOP])}
    return GenerationRequest(tokens, seed, **(settings | fields))


def stop_strings(*strings: str) -> StopStrings:
    """Stop strings in text of `ALPHABET`."""
    return StopStrings(strings, lambda token: [*ALPHABET, "<pad>"][token].encode())


def random_weights(config: Config, scale: float = 1.0) -> dict[str, Tensor]:
    """Draw the same weights at every call; they are so large that distributions are far from uniform."""
    tensors = tensors_of(build(config.model_path, seed=7))
    fill_zeros(tensors.values())
    return {name: tensor.detach() * 2 * scale for name, tensor in tensors.items()}


@torch.no_grad()
def fill_zeros(tensors: Iterable[Tensor]) -> None:
    """Draw the matrices that a model begins with as 0: nothing would depend on what they read."""
    source = torch.Generator().manual_seed(7)
    for tensor in tensors:
        if tensor.dim() > 1 and not tensor.any():
            tensor.normal_(std=0.1, generator=source)


def random_model(folder: Path, seed: int) -> Path:
    """Save a model of `tiny.toml` with random weights."""
    prepare(load_config(TINY, []), folder)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def publish(tensors: dict[str, Tensor], path: Path) -> tuple[str, list[Path]]:
    """Write weights as a trainer does; returns their fingerprint and files."""
    weights.save(tensors, path)
    return weights.fingerprint(tensors), [path]


class ReferenceModel:
    """A transformers model without cache and batches, to compare engines with.

    Args:
        config: of a run with a prepared model folder.
        tensors: its weights.
    """

    def __init__(self, config: Config, tensors: dict[str, Tensor]) -> None:
        self.model = build(config.model_path)
        copy_into(self.model, tensors, "reference")

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits after each token, `[len, vocab] float32`."""
        logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    def logprobs(self, request: GenerationRequest, sample: Generation) -> NDArray[Any]:
        """Log-probs of a sample's tokens at the request's temperature, `[len] float32`."""
        prompt, tokens = request.tokens.tolist(), sample.tokens.tolist()
        logits = self.logits(prompt + tokens)[len(prompt) - 1 : -1] / request.temperature
        chosen = torch.tensor(tokens)[:, None]
        found: NDArray[Any] = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        return found

    def likeliest(self, request: GenerationRequest) -> list[int]:
        """The completion that takes the likeliest token every time."""
        tokens = request.tokens.tolist()
        for _ in range(request.max_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
            if tokens[-1] in request.stop_ids:
                break
        found: list[int] = tokens[len(request.tokens) :]
        return found


def check_logprobs(
    config: Config,
    made: list[tuple[GenerationRequest, Generation]],
    scales: dict[int, float],
    rounding: float,
) -> None:
    """Compare log-probs with `random_weights` of the version that wrote the token, after all tokens before it.

    Args:
        config: of the run.
        made: samples with their requests.
        scales: of the weights, by version.
        rounding: greatest absolute difference.
    """
    for version, scale in scales.items():
        reference = ReferenceModel(config, random_weights(config, scale))
        for request, sample in made:
            wrote = sample.versions == version
            expected = reference.logprobs(request, sample)
            np.testing.assert_allclose(sample.logprobs[wrote], expected[wrote], atol=rounding)
