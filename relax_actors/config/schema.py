"""The configuration of a run: one pydantic model a TOML section, unknown keys refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from broker.subjects import check_name
from relax_actors.config.infrastructure import BrokerSection, StoreSection, SupervisionSection
from relax_actors.config.placement import OPTIONAL, PlacementSection
from relax_actors.config.sections import PoolSection, Positive, PositiveFloat, Section
from relax_actors.config.sglang import SglangSection
from relax_actors.config.simulate import SimulateSection
from relax_actors.config.training import AlgorithmSection, StalenessSection, TrainerSection, WeightsSection


class RunSection(Section):
    """[run]"""

    name: str = "run"
    """Part of every subject and path: letters, digits, `-`, `_`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Positive = 100
    """Optimizer steps."""
    folder: Path | None = None
    """Everything that the run writes lies here; `runs/<name>` if not set."""
    threads: Positive = 1
    """CPU threads of each actor's process; more than cores / busy actors makes all of them slower."""
    deterministic: bool = False
    """Generate and score every row on its own, so that its numbers do not depend on what else is in flight."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        try:
            return check_name(value, "run name")
        except Exception as error:
            raise ValueError(str(error)) from error


class TokenizerSection(Section):
    """[model.tokenizer]: a tokenizer of single characters, for models trained from nothing."""

    alphabet: str
    """Every character that a prompt or a completion may hold."""
    end: str = "#"
    """The character that ends a completion; taken as the end-of-sequence token."""


class ModelSection(Section):
    """[model]: a Hugging Face folder, or an architecture to start from random weights."""

    path: Path | None = None
    """Folder with config.json, tokenizer.json and *.safetensors."""
    architecture: dict[str, Any] | None = None
    """Fields of a Hugging Face config, `model_type` among them; weights are drawn at random from run.seed."""
    tokenizer: TokenizerSection | None = None
    """Required with `architecture`."""

    @model_validator(mode="after")
    def _one(self) -> ModelSection:
        if (self.path is None) == (self.architecture is None):
            msg = "set either model.path (a Hugging Face folder) or model.architecture (train from random weights)"
            raise ValueError(msg)
        if self.architecture is not None and (self.tokenizer is None or "model_type" not in self.architecture):
            msg = "model.architecture needs a `model_type`, and a [model.tokenizer] beside it"
            raise ValueError(msg)
        if self.path is not None and self.tokenizer is not None:
            msg = "model.path brings its own tokenizer; remove [model.tokenizer]"
            raise ValueError(msg)
        return self


class DataSection(Section):
    """[data]: where prompts come from."""

    kind: Literal["jsonl", "parquet", "reasoning_gym", "python"]
    path: Path | None = None
    """File of a jsonl or parquet source; the latter needs the extra `parquet`."""
    task: str | None = None
    """Name of a reasoning-gym task."""
    function: str | None = None
    """Dotted path of a function that returns prompts, found beside the TOML file or among installed packages."""
    size: Positive | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    options: dict[str, Any] = Field(default_factory=dict)
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    template: str = "{prompt}"
    """What the model reads; `{prompt}` is replaced by the task's text."""
    system: str | None = None
    """System message, for models with a chat template."""
    chat: bool | None = None
    """Apply the tokenizer's chat template; by default if it has one."""

    @field_validator("template")
    @classmethod
    def _template(cls, value: str) -> str:
        if "{prompt}" not in value:
            msg = "data.template must contain {prompt}"
            raise ValueError(msg)
        return value


class EvalSection(Section):
    """[eval]: held-out prompts, answered greedily before the first step, every so many steps and at the end."""

    rows: Positive = 64
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 for start and end only."""
    reward: str | dict[str, float] = "exact_match"
    data: DataSection
    """A source of its own, so that nothing trained is held out by mistake."""


class PromptsSection(PoolSection):
    """[prompts]"""

    max_refills: Positive = 100
    """How often a row's place in its step may be refilled after a row was dropped or quarantined; then the run ends."""


class RolloutSection(PoolSection):
    """[rollout]"""

    backend: Literal["transformers", "sglang", "simulated"] = "transformers"
    """`sglang` generates with SGLang, in servers as [rollout.sglang] says; `make sglang` installs it. `simulated` takes
    the time that [simulate] says, and generates next to nothing."""
    device: str = "auto"
    """Torch device; "auto" is CUDA where there is some, else the CPU."""
    group_size: Annotated[int, Field(gt=1)] = 8
    """Samples of a prompt."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Positive = 64
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Nothing stops a sample before it has so many tokens."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a sample, besides the end-of-sequence token; each must be a single token."""
    max_concurrent_prompts: Positive = 16
    """Prompts that an actor generates at once; 1 with run.deterministic."""
    in_flight_updates: bool | None = None
    """Whether samples go on with newer weights in mid-generation (partial rollout), their versions told token by token;
    else they are generated by one version. By default where staleness.max is over 0."""
    sglang: SglangSection = SglangSection()

    @model_validator(mode="after")
    def _order(self) -> RolloutSection:
        if self.min_tokens > self.max_tokens:
            msg = f"rollout.min_tokens = {self.min_tokens} is more than rollout.max_tokens = {self.max_tokens}"
            raise ValueError(msg)
        if self.backend == "sglang" and self.min_tokens:
            msg = (
                f'rollout.min_tokens = {self.min_tokens}: log-probs of backend "sglang" leave out the stop tokens that '
                "are refused; set it to 0, or take another backend"
            )
            raise ValueError(msg)
        urls = len(self.sglang.urls)
        if self.backend == "sglang" and urls not in (0, self.replicas):
            msg = f"rollout.replicas = {self.replicas}, but there are {urls} rollout.sglang.urls; give each actor one"
            raise ValueError(msg)
        return self


class RewardSection(PoolSection):
    """[reward]"""

    function: str | dict[str, float] = "exact_match"
    """Name of a built-in, a dotted path, or a table of them with weights."""
    components: list[str] | None = None
    """Names of the reward components that every row has, beside the reward itself. By default the keys of `function`
    where it is a table, else none; set it for a role of your own that writes components."""


class AdvantagesSection(PoolSection):
    """[advantages]"""

    reads: str = "reward"
    """The column that holds a row's rewards; a shaping role's own column may stand here."""
    normalise: Literal["std", "none"] = "std"


class RoleSection(BaseModel):
    """[roles.<name>]: a role of the user's; keys beyond these are the class's own options. The names `reference` and
    `actor_fwd` are roles of ours, with options `max_concurrent_rows` (8), `device` ("auto") and `backend` ("torch" or
    "megatron"), unless `actor` is set.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    actor: str
    """Dotted path of the class."""
    replicas: Positive = 1
    deadline: PositiveFloat = 60.0
    memory_limit_mib: Positive | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The class's own options."""
        return dict(self.model_extra or {})


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    eval: EvalSection | None = None
    prompts: PromptsSection = PromptsSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    advantages: AdvantagesSection = AdvantagesSection()
    trainer: TrainerSection = TrainerSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    staleness: StalenessSection = StalenessSection()
    weights: WeightsSection = WeightsSection()
    placement: PlacementSection = PlacementSection()
    broker: BrokerSection = BrokerSection()
    store: StoreSection = StoreSection()
    supervision: SupervisionSection = SupervisionSection()
    roles: dict[str, RoleSection] = Field(default_factory=dict)
    simulate: SimulateSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _optional_roles(cls, tree: Any) -> Any:
        roles = tree.get("roles") if isinstance(tree, dict) else None
        if not isinstance(roles, dict):
            return tree
        ours = {n: {"actor": OPTIONAL[n], **s} for n, s in roles.items() if n in OPTIONAL and isinstance(s, dict)}
        return tree | {"roles": roles | ours}

    @model_validator(mode="after")
    def _across(self) -> Config:
        for name in self.roles:
            try:
                check_name(name, "role name")
            except Exception as error:
                raise ValueError(str(error)) from error
            if name in BUILT_IN:
                msg = f"roles.{name}: {name!r} is built in; choose another name, or set [{name}]"
                raise ValueError(msg)
        if self.prompts.replicas != 1:
            msg = "prompts.replicas must be 1: one actor owns the admission of rows"
            raise ValueError(msg)
        computing = {"rollout", "reward", "advantages", "trainer", *self.roles}
        for name in sorted({name for group in self.placement.colocate for name in group} - computing):
            msg = f"placement.colocate names {name!r}; roles of this run that compute are {sorted(computing)}"
            raise ValueError(msg)
        if self.staleness.policy == "correct" and self.algorithm.correction == self.algorithm.reject == "none":
            msg = (
                'staleness.policy = "correct" trains rows however old they are, and needs what corrects them: set '
                "algorithm.correction (with algorithm.proximal) or algorithm.reject"
            )
            raise ValueError(msg)
        simulated = "simulated" in (self.rollout.backend, self.trainer.backend)
        if simulated != (self.simulate is not None) or (simulated and self.rollout.backend != self.trainer.backend):
            msg = 'simulated engines come together: rollout.backend and trainer.backend = "simulated", and [simulate]'
            raise ValueError(msg)
        if self.rollout.in_flight_updates and self.staleness.max == 0:
            msg = "rollout.in_flight_updates = true needs staleness.max of 1 or more: on-policy rows are of one version"
            raise ValueError(msg)
        if self.run.deterministic and self.rollout.max_concurrent_prompts != 1:
            object.__setattr__(self, "rollout", self.rollout.model_copy(update={"max_concurrent_prompts": 1}))
        return self

    @model_validator(mode="after")
    def _sends_tensors(self) -> Config:
        if self.simulate is not None and self.weights.transport != "store":
            msg = 'weights.transport = "torch" needs tensors to send, and simulated engines have none; set "store"'
            raise ValueError(msg)
        if self.trainer.backend == "megatron" and self.trainer.megatron.ranks > 1 and self.weights.transport != "store":
            msg = (
                'weights.transport = "torch" sends from the memory of the trainer\'s process, and the ranks of '
                'trainer.megatron are others when there are more than one; set "store"'
            )
            raise ValueError(msg)
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder or Path("runs") / self.run.name

    @property
    def store_path(self) -> Path:
        """The folder of the store."""
        return self.store.path or self.folder / "store"

    @property
    def owns_servers(self) -> bool:
        """Whether each actor of the rollout has an inference server that the run starts."""
        return self.rollout.backend == "sglang" and not self.rollout.sglang.urls

    @property
    def updates_in_flight(self) -> bool:
        """Whether samples that are being generated go on with newer weights."""
        return self.staleness.max > 0 if self.rollout.in_flight_updates is None else self.rollout.in_flight_updates

    @property
    def computes_reference(self) -> bool:
        """Whether the trainer itself computes the reference's log-probs: KL is wanted, and no actor computes them."""
        return self.algorithm.kl_coefficient > 0 and "reference" not in self.roles

    @property
    def publishes_deltas(self) -> bool:
        """Whether weights may be published as deltas: in float32 nearly every number changes at every step."""
        return self.weights.delta == "auto" and self.trainer.precision != "float32"

    @property
    def reward_components(self) -> tuple[str, ...]:
        """Names of the reward components that every row of the run has."""
        if self.reward.components is not None:
            return tuple(self.reward.components)
        return tuple(self.reward.function) if isinstance(self.reward.function, dict) else ()

    @property
    def model_path(self) -> Path:
        """The model's folder: the user's, or the one made below the run's folder."""
        return self.model.path or self.folder / "model-config"


BUILT_IN = ("prompts", "rollout", "reward", "advantages", "trainer", "evaluator")
