"""The whole configuration: one pydantic model for each TOML section, and the checks across sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from broker.subjects import check_name
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.autoscaler import AutoscalerSection
from relax_actors.config.data import DataSection, ModelSection
from relax_actors.config.environment import EnvironmentSection, longest_sample
from relax_actors.config.evaluation import EvalSection, HeldOutRows
from relax_actors.config.gateway import AgentSection, GatewaySection
from relax_actors.config.infrastructure import BrokerSection, StoreSection, SupervisionSection
from relax_actors.config.lora import LoraSection
from relax_actors.config.media import MediaSection, is_multimodal
from relax_actors.config.notify import NotifySection
from relax_actors.config.placement import PlacementSection
from relax_actors.config.players import PlayersSection
from relax_actors.config.pools import (
    AdvantagesSection,
    ExamplesSection,
    PromptsSection,
    RewardSection,
    RoleSection,
    RolloutSection,
)
from relax_actors.config.record import RecordSection
from relax_actors.config.rows import foreign_section, unreachable_backlog
from relax_actors.config.run import RunSection
from relax_actors.config.sections import Section
from relax_actors.config.simulate import SimulateSection
from relax_actors.config.training import (
    CriticSection,
    StalenessSection,
    TrainerRankSection,
    TrainerSection,
    WeightsSection,
)
from relax_actors.registry.catalog import ROLES
from relax_actors.registry.role_spec import RoleSpec

MAX_ROLE_NAME = 54
"""Longest name of a role: columns and keys contain it, and a token of a subject has at most 64 characters."""
NOT_ROLES = (
    *("broker", "chaos", "node", "observer", "operator", "owner", "private", "recorder", "root", "run", "server"),
    "zygote",
)
"""Authors of events, users, leases and folders that belong to no role: views would believe a role of such a name."""


class Config(HeldOutRows, Section):
    """The configuration of a run.

    Validators fill unset settings from sections declared above, so the order of the fields matters.
    """

    model_config = ConfigDict(validate_default=True)

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    prompts: PromptsSection = PromptsSection()
    examples: ExamplesSection = ExamplesSection()
    media: MediaSection | None = None
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection | None = None
    agent: AgentSection | None = None
    gateway: GatewaySection | None = None
    autoscaler: AutoscalerSection | None = None
    eval: EvalSection | None = None
    reward: RewardSection = RewardSection()
    advantages: AdvantagesSection = AdvantagesSection()
    trainer: TrainerSection = TrainerSection()
    lora: LoraSection | None = None
    critic: CriticSection | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    staleness: StalenessSection = StalenessSection()
    weights: WeightsSection = WeightsSection()
    placement: PlacementSection = PlacementSection()
    broker: BrokerSection = BrokerSection()
    store: StoreSection = StoreSection()
    supervision: SupervisionSection = SupervisionSection()
    record: RecordSection = RecordSection()
    roles: dict[str, RoleSection] = Field(default_factory=dict)
    simulate: SimulateSection | None = None
    notify: NotifySection | None = None

    @model_validator(mode="before")
    @classmethod
    def _registered_roles(cls, tree: Any) -> Any:
        """Let [roles.<name>] without `actor` mean the role that is registered under that name."""
        roles = tree.get("roles") if isinstance(tree, dict) else None
        if not isinstance(roles, dict):
            return tree
        named = {
            name: {"actor": name, **section}
            for name, section in roles.items()
            if isinstance(section, dict) and "actor" not in section and name in ROLES
        }
        return tree | {"roles": roles | named}

    @field_validator("media")
    @classmethod
    def _media(cls, value: MediaSection | None, info: ValidationInfo) -> MediaSection | None:
        """Give runs of multimodal models the section [media], so that other code need not inspect the model."""
        model: ModelSection | None = info.data.get("model")
        if value is None and model is not None and is_multimodal(model.path, model.architecture):
            return MediaSection()
        return value

    @field_validator("gateway")
    @classmethod
    def _gateway(cls, value: GatewaySection | None, info: ValidationInfo) -> GatewaySection | None:
        """Give every run with agents a gateway, by which they ask the policy."""
        return GatewaySection() if value is None and info.data.get("agent") is not None else value

    @field_validator("rollout")
    @classmethod
    def _rollout(cls, value: RolloutSection, info: ValidationInfo) -> RolloutSection:
        """Generate the rows of a deterministic run one by one."""
        run: RunSection | None = info.data.get("run")
        if run is None or not run.deterministic:
            return value
        return value.model_copy(update={"max_concurrent_prompts": 1})

    @field_validator("eval")
    @classmethod
    def _eval(cls, value: EvalSection | None, info: ValidationInfo) -> EvalSection | None:
        """Let the environment or the agent give the reward of held-out rows, unless it is set; check their lengths."""
        rollout: RolloutSection | None = info.data.get("rollout")
        if value is None or rollout is None:
            return value
        value.check_lengths(rollout.max_tokens)
        return value.with_reward("environment") if _has_episodes(info) else value

    @field_validator("reward")
    @classmethod
    def _reward(cls, value: RewardSection, info: ValidationInfo) -> RewardSection:
        """Let the environment or the agent give the reward, or the traces of [data], unless it is set."""
        data: DataSection | None = info.data.get("data")
        given = "environment" if _has_episodes(info) else "recorded" if data is not None and data.has_traces else None
        if given is None or {"function", "actor"} & value.model_fields_set:
            return value
        return value.model_copy(update={"function": given})

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: AlgorithmSection, info: ValidationInfo) -> AlgorithmSection:
        """Compare turns where the environment gives credit to them; take lengths that are not set from the rollout."""
        rollout: RolloutSection | None = info.data.get("rollout")
        environment: EnvironmentSection | None = info.data.get("environment")
        if rollout is None:
            return value
        if environment is not None and environment.credit != "episode" and value.advantage == "group":
            value = value.model_copy(update={"advantage": "turn"})
        return value.with_lengths(rollout.max_tokens, longest_sample(rollout.max_tokens, environment))

    @model_validator(mode="after")
    def _role_names(self) -> Config:
        for name in self.roles:
            try:
                check_name(name, "role name")
            except Exception as error:
                raise ValueError(str(error)) from error
            if len(name) > MAX_ROLE_NAME:
                msg = f"roles.{name}: the name has {len(name)} characters; use at most {MAX_ROLE_NAME}"
                raise ValueError(msg)
            if name in NOT_ROLES:
                msg = f"roles.{name}: {name!r} names another part of a run; choose another name"
                raise ValueError(msg)
            if name in ROLES.built_in and _spec(name).section != "roles":
                msg = f"roles.{name}: {name!r} is built in; choose another name, or set [{name}]"
                raise ValueError(msg)
        if self.prompts.replicas != 1:
            msg = "prompts.replicas must be 1: one actor owns the admission of rows"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _colocated_roles(self) -> Config:
        colocated = {name for group in self.placement.colocate for name in group}
        if not colocated:
            return self
        specs = {name: _spec(name) for name in ROLES.built_in}
        sections = {name: spec for name, spec in specs.items() if spec.section != "roles"}
        computing = {*self.roles, *(name for name, spec in sections.items() if spec.device or not spec.single)}
        for name in sorted(colocated - computing):
            msg = f"placement.colocate names {name!r}; the roles of this run that compute are {sorted(computing)}"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _episodes(self) -> Config:
        """Check what episodes with an environment cannot have."""
        if self.environment is None:
            return self
        credit = self.environment.credit
        played = self.environment.played
        if self.agent is not None and played:
            setting = played[0]
            msg = (
                f"environment.{setting} is about episodes that the run plays, but with [agent] the agent plays, and "
                f"its sample has the sum of the environment's rewards; leave environment.{setting} out"
            )
            raise ValueError(msg)
        if credit != "episode" and self.reward.function != "environment":
            msg = (
                f'environment.credit = "{credit}" gives credit by the rewards of the environment, but reward.function '
                f'is {self.reward.function!r}; set reward.function = "environment", or environment.credit = "episode"'
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _rows(self) -> Config:
        if problem := foreign_section(self, self.algorithm.rows) or unreachable_backlog(self):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _across(self) -> Config:
        if (
            self.staleness.policy == "correct"
            and self.algorithm.correction.kind == self.algorithm.reject.kind == "none"
        ):
            msg = (
                'staleness.policy = "correct" trains rows of any staleness and needs an off-policy correction; set '
                "algorithm.correction.kind (with algorithm.proximal) or algorithm.reject.kind"
            )
            raise ValueError(msg)
        simulated = "simulated" in (self.rollout.backend, self.trainer.backend)
        if simulated != (self.simulate is not None) or (simulated and self.rollout.backend != self.trainer.backend):
            msg = (
                "simulated engines come together; set both rollout.backend and trainer.backend to "
                '"simulated" and add [simulate], or none of them'
            )
            raise ValueError(msg)
        if self.simulate is not None and (self.trainer.updates > 1 or self.critic is not None):
            key = "critic" if self.critic is not None else "trainer.minibatches and trainer.epochs"
            msg = f"{key}: simulated engines take the time of whole steps from [simulate]; leave it out"
            raise ValueError(msg)
        if self.rollout.in_flight_updates and self.staleness.max == 0:
            msg = (
                "rollout.in_flight_updates = true changes the weights within a row, and with staleness.max = 0 a row "
                "has one version; set staleness.max to 1 or more, or rollout.in_flight_updates = false"
            )
            raise ValueError(msg)
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder or Path("runs") / self.run.name

    @property
    def longest_sample(self) -> int:
        """Limit of the tokens of a sample: of a completion, or the budget of an episode if it has one."""
        return longest_sample(self.rollout.max_tokens, self.environment)

    @property
    def store_path(self) -> Path:
        """The folder of the store."""
        return self.store.path or self.folder / "store"

    @property
    def trainer_rank(self) -> TrainerRankSection | None:
        """Settings of the role `trainer_rank`; None if all ranks of the trainer are on its node."""
        return self.trainer.elsewhere

    @property
    def local_agent(self) -> AgentSection | None:
        """The section [agent] if actors of this run run the agents."""
        agent = self.agent
        return agent if agent is not None and (agent.command or agent.function) else None

    @property
    def playing(self) -> PlayersSection | None:
        """The section whose players play, [agent] or else [environment]; None if samples are completions."""
        return self.agent or self.environment

    @property
    def players(self) -> tuple[str, ...]:
        """Players of the samples; empty without players."""
        return () if self.playing is None else self.playing.players

    @property
    def credit(self) -> tuple[Literal["episode", "branch", "turn"], float]:
        """What the reward of a turn counts for, and the discount factor of later ones."""
        section = self.environment
        return ("episode", 1.0) if section is None else (section.credit, section.discount)

    @property
    def updates_in_flight(self) -> bool:
        """Whether in-flight samples continue with newer weights."""
        return self.staleness.max > 0 if self.rollout.in_flight_updates is None else self.rollout.in_flight_updates

    @property
    def from_data(self) -> bool:
        """Whether rows come from data: no policy samples them, and they have no rewards."""
        return self.algorithm.rows != "sampled"

    @property
    def generates(self) -> bool:
        """Whether the policy samples the rows of this run."""
        return not (self.from_data or self.data.has_traces)

    @property
    def computes_reference(self) -> bool:
        """Whether the trainer itself computes the reference's log-probs, for a KL in the loss without the role."""
        return self.algorithm.loss_reads_reference and "reference" not in self.roles

    @property
    def head_precision(self) -> str:
        """Precision of the computation of logits."""
        return "float32" if self.model.fp32_lm_head else self.trainer.precision

    @property
    def publishes_deltas(self) -> bool:
        """Whether weights may be published as deltas; in float32, and of an adapter, nearly every number changes."""
        return self.weights.delta == "auto" and self.trainer.precision != "float32" and self.lora is None

    @property
    def model_path(self) -> Path:
        """The model's folder: the user's, or the generated one in the run's folder."""
        return self.model.path or self.folder / "model-config"

    @property
    def reward_components(self) -> tuple[str, ...]:
        """Names of the reward components that every row of the run has; empty if the reward has no components."""
        if self.reward.components is not None:
            return self.reward.components
        if self.reward.function == "environment":
            return self.players
        return tuple(self.reward.function) if isinstance(self.reward.function, dict) else ()


def _spec(name: str) -> RoleSpec:
    """The spec of a built-in role; imports the role's module, which imports no engine."""
    spec: RoleSpec = ROLES.load(name, "role").spec  # type: ignore[attr-defined]
    return spec


def _has_episodes(info: ValidationInfo) -> bool:
    return info.data.get("environment") is not None or info.data.get("agent") is not None
