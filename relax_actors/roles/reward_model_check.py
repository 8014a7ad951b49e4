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
from relax_actors.media.family import family_of
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
        if config.players:
            msg = (
                f"{SECTION} scores whole samples, and those of this run have players; remove the section or the players"
            )
            raise ConfigError(msg)
        if config.run.stage is not None and not self.model.exists():
            yield f"{SECTION}.model {self.model} is checked once an earlier stage has trained it"
            return
        folder = read_score_folder(self.model, f"{SECTION}.model")
        if run.model is not None:
            self._check_media(config, folder, run.model.folder)
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

    def _check_media(self, config: Config, folder: ScoreFolder, policy_folder: Path) -> None:
        """Check that the model reads what the prompts hold: their tokens and features are those of the policy."""
        own, policy = family_of(self.model), family_of(policy_folder)
        why = ""
        names = ["text alone" if each is None else f"media as {each.model_type}" for each in (own, policy)]
        if names[0] != names[1]:
            why = f"reads {names[0]}, and the run's model reads {names[1]}; name a reward model of the same family"
        elif own is not None and _vocabulary(self.model) != _vocabulary(policy_folder):
            why = (
                "has another tokenizer than the run's model, whose prompts with media it reads; name one with the same"
            )
        elif own is not None and self.backend != "torch":
            why = f'reads media, which {SECTION}.backend = "{self.backend}" does not; set it to "torch"'
        elif own is not None and folder.of_steps:
            why = "scores steps, which are read in texts alone; name a model that scores answers"
        elif own is not None and (config.environment is not None or config.agent is not None):
            what = "[environment]" if config.environment is not None else "[agent]"
            why = f"reads media before one answer, and {what} makes samples of several turns; remove the section"
        if why:
            msg = f"{SECTION}.model {self.model} {why}"
            raise ConfigError(msg)

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


def _vocabulary(folder: Path) -> dict[str, int]:
    return Tokenizer(folder).inner.get_vocab()
