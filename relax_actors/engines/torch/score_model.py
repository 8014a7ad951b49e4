"""Reward models: a decoder with a linear head `score`, as transformers' classes for classification have it.

Scores of answers are read by a sequence classifier, those of steps by a token classifier. Both compute a score from the
hidden state of a token, so a folder of either kind loads in transformers and gives the scores of the trainer.
transformers has no classifiers for multimodal models; here the policy gets `score` in place of `lm_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from relax_actors.config import Config
from relax_actors.data.model_folder import stored_shapes
from relax_actors.data.score_folder import ANSWERS, STEP_SEPARATOR
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.torch.model import build, config_of, read_folder, tensors_of
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of
from relax_actors.weights.encoder import published_dtype

SCORE = "score."
"""Beginning of the names of the head's weights."""
_VOCABULARY = "lm_head."


def build_score_model(
    path: Path,
    *,
    classes: int,
    of_steps: bool,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = "cpu",
) -> PreTrainedModel:
    """Build the architecture of a policy's or reward model's folder with a head of `classes` scores, at random.

    With `of_steps` it is a token classifier in place of a sequence classifier, which a model of media cannot be. Other
    arguments as of `model.build`.

    Raises:
        ConfigError: transformers cannot build such a model from the folder, or its head is not linear.
    """
    auto: Any = AutoModelForTokenClassification if of_steps else AutoModelForSequenceClassification
    try:
        config = config_of(path, num_labels=classes)
        if family_of(path) is not None:
            config.num_labels, auto = classes, _MediaClassifiers
        if seed is not None:
            torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} holds no model that transformers can build as a reward model: {error}"
        raise ConfigError(msg) from error
    if not isinstance(getattr(model, "score", None), nn.Linear):
        msg = f"{path}: {type(model).__name__} has no linear head `score`; train a reward model from another model"
        raise ConfigError(msg)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model


class _MediaClassifiers:
    """Builds classifiers of multimodal models, as transformers' classes Auto* build those of models of text."""

    @staticmethod
    def from_config(config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
        policy: Any = AutoModelForMultimodalLM._model_mapping[type(config)]  # noqa: SLF001
        name = policy.__name__.rpartition("For")[0] + ANSWERS
        model: PreTrainedModel = type(name, (_WithScores, policy), {})._from_config(config, **settings)  # type: ignore[attr-defined]  # noqa: SLF001
        for buffer_name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(published_dtype(buffer_name, buffer.dtype))
        return model


class _WithScores:
    """Replaces the head of a policy by `score`, of `config.num_labels` scores."""

    _tied_weights_keys = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        own: Any = self
        del own.lm_head
        own.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        own.post_init()

    def get_output_embeddings(self) -> None:
        """Return None: it has none."""

    @classmethod
    def can_generate(cls) -> bool:
        """Return False: it has no logits."""
        return False


def model_maker(config: Config) -> Callable[..., PreTrainedModel]:
    """Return a function that builds the model which a run trains, from `seed`, `dtype` and `device`."""

    def make(**settings: Any) -> PreTrainedModel:
        algorithm = config.algorithm
        if not algorithm.trains_scores:
            return build(config.model_path, **settings)
        of_steps = algorithm.rows == "steps"
        return build_score_model(config.model_path, classes=algorithm.scores.classes, of_steps=of_steps, **settings)

    return make


def stored_scores(model: PreTrainedModel, path: Path, seed: int) -> dict[str, Tensor]:
    """Read the weights of a folder for a reward model, by their names in `model`, of which only shapes are read.

    A folder of a policy has none for the head. They are drawn from `seed` then, as transformers initialises linear
    layers.
    """
    if any(name.startswith(SCORE) for name in stored_shapes(path)):
        return read_folder(model, path)
    with torch.device("meta"):
        policy = build(path, device=None)
    body = {n: t for n, t in read_folder(policy, path).items() if not n.startswith(_VOCABULARY)}
    return body | drawn_head(model, seed)


def drawn_head(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Draw the head of a reward model, of which only shapes are read; see `stored_scores`."""
    random, drawn = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    spread = float(getattr(model.config.get_text_config(), "initializer_range", None) or 0.02)
    for name, tensor in tensors_of(model).items():
        if name.startswith(SCORE):
            head = torch.zeros(tensor.shape)
            drawn[name] = head.normal_(0, spread, generator=random) if name.endswith("weight") else head
    return drawn


def exported_model(config: Config, **settings: Any) -> PreTrainedModel:
    """Build the model which a run trains, with the configuration of its folder; arguments as of `model_maker`."""
    model = model_maker(config)(**settings)
    complete_config(model, config)
    return model


def complete_config(model: PreTrainedModel, config: Config) -> None:
    """Write into a reward model's configuration how its scores are read, before a folder of it is written.

    Nothing changes for a model of tokens. A sequence classifier reads the last token that is not padding, so no token
    that ends an answer may be padding.
    """
    if not config.algorithm.trains_scores:
        return
    settings = model.config.get_text_config()
    tokenizer = Tokenizer(config.model_path)
    special = [i for i, token in sorted(tokenizer.inner.get_added_tokens_decoder().items()) if token.special]
    known = [settings.pad_token_id, *special]
    settings.pad_token_id = next((i for i in known if i is not None and i not in tokenizer.stop_ids), None)
    if config.algorithm.rows == "steps":
        setattr(model.config, STEP_SEPARATOR, config.examples.step_separator)
