"""Options of the role `reward_model`, and their check before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.score_folder import ScoreFolder, read_score_folder
from relax_actors.data.scored_answers import ScoredAnswers
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import refuse_shared_device
from relax_actors.engines.sglang.reward_check import check_reward_model
from relax_actors.engines.torch.architectures import check_score_head
from relax_actors.errors import ConfigError
from relax_actors.runtime import Role

SECTION = "roles.reward_model"


class CheckedRewardModel(Role):
    """Options of a reward model, and their check."""

    model: Path
    """Folder of a reward model: a sequence classifier, or a token classifier that scores steps."""
    device: str = "auto"
    """Torch device; "auto" is CUDA if available, else the CPU."""
    backend: Literal["torch", "sglang"] = "torch"
    """Engine: torch in the actor's process; or an SGLang server of its own, for scores of whole answers."""
    value: Literal["auto", "score", "probability"] = "auto"
    """Number that is the reward: the score (of several classes the log-odds of `label`), or the probability of `label`;
    "auto" is the score of a model with one, and the probability with several."""
    label: int | None = None
    """Class whose probability counts, of a model with several; the last one by default."""
    steps: Literal["min", "mean", "product", "last", "tokens"] = "min"
    """How the values of the steps of an answer become its reward; "tokens" gives each to the last token of its step."""
    oversize: Literal["skip", "truncate_right"] = "skip"
    """What happens to an answer that is too long for the reward model: its row is quarantined, or it is cut off."""

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """Return the options of every role, and `max_concurrent_rows`."""
        return super().options() | {"max_concurrent_rows": (Annotated[int, Field(gt=0)], 8)}

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check the folder and its tokenizer."""
        config = run.config
        if config.media is not None:
            msg = (
                f"{SECTION} reads texts, and the prompts of this model have images, video or sound; remove the section"
            )
            raise ConfigError(msg)
        if config.players:
            msg = (
                f"{SECTION} scores whole samples, and those of this run have players; remove the section or the players"
            )
            raise ConfigError(msg)
        if config.run.stage is not None and not self.model.exists():
            yield f"{SECTION}.model {self.model} is checked once an earlier stage has trained it"
            return
        folder = read_score_folder(self.model, f"{SECTION}.model")
        check_score_head(self.model, of_steps=folder.of_steps)
        if self.backend == "sglang":
            refuse_shared_device(config, "reward_model", f'{SECTION}.backend = "sglang"')
            yield from check_reward_model(self.model, folder, f'{SECTION}.backend = "sglang"')
        self._check_values(folder, config)
        tokenizer = Tokenizer(self.model)
        policy, chat = run.model, config.data.chat
        chats = policy is not None and policy.tokenizer.has_chat_template if chat is None else chat
        if chats and not tokenizer.has_chat_template:
            msg = (
                f"{SECTION}.model {self.model} has no chat template, and the prompts of this run are chats; add "
                "chat_template.jinja to its folder, or set data.chat = false"
            )
            raise ConfigError(msg)
        kind = "steps" if folder.of_steps else "answers"
        yield f"the reward model scores {kind}, with {folder.parameters / 1e6:.2f} M parameters"

    def answers(self, config: Config, tokenizer: Tokenizer, folder: ScoreFolder) -> ScoredAnswers:
        """Return what tokenizes answers for the reward model."""
        most = min(folder.context_length, config.trainer.max_tokens_per_microbatch)
        return ScoredAnswers(tokenizer, folder, most, truncates=self.oversize == "truncate_right")

    def _check_values(self, folder: ScoreFolder, config: Config) -> None:
        if self.label is not None and not (folder.classes > 1 and 0 <= self.label < folder.classes):
            msg = f"{SECTION}.label = {self.label} is no class of a model with {folder.classes}; leave it out"
            raise ConfigError(msg)
        if not folder.of_steps and self.steps != type(self).steps:
            msg = f'{SECTION}.steps = "{self.steps}" has no effect: {self.model} scores whole answers; leave it out'
            raise ConfigError(msg)
        if folder.of_steps and (config.environment is not None or config.agent is not None):
            msg = f"{SECTION}.model scores the steps of one answer, and samples of this run have several turns"
            raise ConfigError(msg)
