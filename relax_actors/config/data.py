"""The sections [model] and [data]: which model is trained, and on which prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from relax_actors.config.media import KINDS
from relax_actors.config.sections import Section
from relax_actors.config.sources import MixedSection
from relax_actors.messages.media import Kind

PATH_EXAMPLE = """\
  [model]
  path = "Qwen3-0.6B"        # folder with config.json, tokenizer.json and *.safetensors"""
ARCHITECTURE_EXAMPLE = """\
  [model.architecture]
  model_type = "qwen3"
  hidden_size = 64
  intermediate_size = 176
  num_hidden_layers = 3
  num_attention_heads = 4
  max_position_embeddings = 64

  [model.tokenizer]
  alphabet = "0123456789>#\""""


class TokenizerSection(Section):
    """[model.tokenizer]: a tokenizer of single characters, for a model that starts from random weights."""

    alphabet: str
    """All characters that prompts and completions may contain."""
    end: str = "#"
    """End-of-sequence character; must be in the alphabet."""
    chat_template: str | None = None
    """Jinja template that writes a conversation with these characters, `end` behind each answer; none if not set."""


class ModelSection(Section):
    """[model]: a Hugging Face folder, or an architecture that starts from random weights."""

    path: Path | None = None
    """Folder with config.json, tokenizer.json and *.safetensors."""
    architecture: dict[str, Any] | None = None
    """Fields of a Hugging Face config.json, including `model_type`. Weights are drawn at random from `run.seed`."""
    tokenizer: TokenizerSection | None = None
    """Required with `architecture`."""
    fp32_lm_head: bool = False
    """Compute logits in float32 in trainer, scoring roles and rollout, also where the layers before the output head
    compute in half precision: log-probs of both sides then differ less. The head takes more time and memory."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.architecture is None):
            msg = (
                "set either model.path (a Hugging Face folder) or model.architecture (train from random weights), for "
                f"example:\n{PATH_EXAMPLE}\nor\n{ARCHITECTURE_EXAMPLE}"
            )
            raise ValueError(msg)
        if self.architecture is not None and (self.tokenizer is None or "model_type" not in self.architecture):
            lacks = "a [model.tokenizer] beside it" if "model_type" in self.architecture else "a `model_type`"
            msg = f"model.architecture needs {lacks}, for example:\n{ARCHITECTURE_EXAMPLE}"
            raise ValueError(msg)
        if self.path is not None and self.tokenizer is not None:
            msg = "model.path has its own tokenizer; remove [model.tokenizer]"
            raise ValueError(msg)
        return self


class DataSection(MixedSection):
    """[data]: where prompts come from."""

    stop: Literal["first", "all"] = "first"
    """End of an epoch of a mixture with weights: "first", when one source has no rows left; "all", when every source
    was read to its end, and shorter sources repeat. Without `run.epochs` all sources repeat until `run.steps`."""
    shuffle: bool = True
    """Whether each epoch has a new order; false keeps the order of the files."""
    oversize: Literal["skip", "keep", "truncate_left", "truncate_right", "split"] = "skip"
    """What happens to a row that is longer than the model's context or `trainer.max_tokens_per_microbatch` allow.
    "skip" quarantines it, and the next row takes its place; "keep" keeps the prompt and shortens completions to the
    tokens that remain; "truncate_left" and "truncate_right" cut off the beginning or the end of the prompt's text, or
    of the whole example where rows come from data; "split" divides an example into pieces, all of which are
    trained."""
    template: str = "{prompt}"
    """Text that the model reads; `{prompt}` is replaced by the prompt of the task."""
    system: str | None = None
    """System message, for models with a chat template."""
    chat: bool | None = None
    """Whether to apply the tokenizer's chat template; by default if it has one."""
    media: dict[Kind, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the media of this data set by kind, e.g. `media.image.max_pixels = 65536`; they replace those of
    [media.image], [media.video] and [media.audio]."""

    @field_validator("media")
    @classmethod
    def _media(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for kind, options in value.items():
            try:
                KINDS[kind].model_validate(options)
            except ValidationError as error:
                first = error.errors()[0]
                msg = f"{'.'.join([kind, *map(str, first['loc'])])}: {first['msg']}"
                raise ValueError(msg) from error
        return value

    @field_validator("template")
    @classmethod
    def _template(cls, value: str) -> str:
        if "{prompt}" not in value:
            msg = "data.template must contain {prompt}"
            raise ValueError(msg)
        return value
