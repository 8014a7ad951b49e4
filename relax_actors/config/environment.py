"""The section [environment]: episodes of several turns with an environment, in a pool of actors of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from relax_actors.config.players import PlayersSection
from relax_actors.config.sections import Fraction, Named, NonNegativeInt, Positive, PositiveFloat
from relax_actors.registry.catalog import ENVIRONMENTS

PLAYED = (
    *("players", "trained", "credit", "discount", "prompt", "token_budget", "episode_seconds"),
    *("on_error", "on_rewrite", "max_refills", "mask_truncated"),
)
"""Settings of [environment] that are about episodes which the run plays."""


class EnvironmentSection(PlayersSection):
    """[environment]: the environment that the model acts in. With it, samples are episodes of several turns."""

    title: ClassVar[str] = "environment"

    name: Annotated[str, Named(ENVIRONMENTS)]
    """Environment: a registered name, or the dotted path of your own subclass of `relax_actors.envs.Environment`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment's class."""
    gpus: NonNegativeInt = 0
    """GPUs of an actor, for environments that compute on them; other actors do not get them."""
    prompt: Literal["data", "environment"] = "data"
    """Where an episode's prompt comes from: "data" appends the first observation, if it is not empty, to the prompt of
    the data; "environment" takes the first observation alone."""
    sessions: Positive = 64
    """Episodes that an actor hosts at once, each in a process of its own."""
    open_seconds: PositiveFloat = 60.0
    """Deadline of opening an environment, replayed turns included."""
    step_seconds: PositiveFloat = 30.0
    """Deadline of a step. An environment that takes longer is killed, and its sample ends with reason `error`."""
    max_turns: Positive = 16
    """Actions of an episode; it then ends with reason `max_turns`."""
    token_budget: Positive | None = None
    """Tokens of an episode behind the prompt, observations included; by default what the model and
    trainer.max_tokens_per_microbatch have room for. An episode without room ends with reason `token_budget`."""
    episode_seconds: PositiveFloat = 3600.0
    """Duration of an episode, turns that another actor generated included; it then ends with reason `timeout`."""
    cpu_seconds: Positive | None = None
    """CPU time of a session's process, after which the kernel kills it. Unlimited if not set. `memory_limit_mib` bounds
    the memory of each session's process, too."""
    max_observation_bytes: Annotated[int, Field(gt=0, le=2 << 20)] = 1 << 20
    """Largest observation. A larger one ends its sample with reason `error`."""
    on_error: Literal["exclude", "refill", "zero"] = "exclude"
    """What happens to a sample whose environment failed: "exclude" computes the group's advantages without it, "refill"
    generates it again, "zero" trains it with reward 0."""
    on_rewrite: Literal["branch", "error"] = "branch"
    """What happens where the chat template would write the conversation in another way than its tokens so far, because
    it drops earlier reasoning, for example: "branch" continues in a new token sequence of the sample, "error" ends the
    sample with reason `error`."""
    max_refills: NonNegativeInt = 3
    """Attempts at a sample beyond the first one with "refill"; then it is excluded."""
    mask_truncated: bool = False
    """Whether samples that ended by a limit (max_turns, token_budget, length, timeout) are left out of the loss."""
    credit: Literal["episode", "branch", "turn"] = "episode"
    """What the reward of a turn counts for: "episode" sums the rewards of a sample; "turn" gives each turn its own
    return, the rewards from it to the end; "branch" gives each sequence of a sample its own return, where the chat
    template or a player's turn begins a new one. With "turn" and "branch", which need `reward.function =
    "environment"`, `algorithm.advantage = "turn"` takes the place of "group"."""
    discount: Fraction = 1.0
    """Discount factor of rewards of later turns or branches where credit goes to them."""
    isolation: Literal["none", "sandbox"] = "none"
    """"sandbox" runs the actors without network but the broker, with a read-only view of the Python installation, the
    folder of the configuration, `readable`, the store and the model, and with an empty /tmp; needs bubblewrap."""
    readable: tuple[Path, ...] | None = None
    """Further files and folders that a sandbox shows, read-only."""
    max_processes: Positive | None = None
    """Limit of processes and threads in a sandbox; unlimited if not set. For root it needs a control group."""

    @property
    def played(self) -> list[str]:
        """Names of the settings of `PLAYED` that are not their defaults."""
        fields = type(self).model_fields
        return [name for name in PLAYED if getattr(self, name) != fields[name].default]


def longest_sample(max_tokens: int, environment: EnvironmentSection | None) -> int:
    """Return the limit of the tokens of a sample: of a completion, or the budget of an episode if it has one."""
    budget = None if environment is None else environment.token_budget
    return max_tokens if budget is None else budget
