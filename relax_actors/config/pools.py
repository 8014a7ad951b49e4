"""The sections of roles that run as pools of actors, and of the role that admits rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from relax_actors.config.sections import (
    Fraction,
    Named,
    NonNegative,
    NonNegativeInt,
    PoolSection,
    Positive,
    PositiveFloat,
    Section,
)
from relax_actors.registry.catalog import INFERENCE_ENGINES


class SglangSection(Section):
    """[rollout.sglang]: one server on this machine per rollout actor, unless `urls` are set.

    A server's model, context length, concurrency and seeds follow from the other sections.
    """

    urls: list[str] = Field(default_factory=list)
    """External servers, one per rollout actor. They must see the run's folder and serve this run alone. Actors of nodes
    that join later cannot use them. Refused for models that take images, video or sound."""
    api_key_file: Path | None = None
    """File with the API key of the servers in `urls`."""
    weights: Literal["disk", "shared", "group"] = "disk"
    """How a server receives weights: from a file that the actors of a node share; from memory that they and their
    servers share, where up to three versions lie; or by broadcast in a gloo process group. The last two are refused
    with `urls`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the server; "auto" is `trainer.precision`."""
    quantization: Literal["none", "fp8", "int4"] = "none"
    """How a server holds the weights of linear layers, which it quantises from each published version: "fp8", in float8
    with a scale for each block of 128 x 128, and their inputs with a scale for 128 neighbours of a token. "int4" is
    refused, as SGLang cannot update such weights. Published weights keep the run's precision."""
    tensor_parallel: Positive = 1
    """GPUs per server, as SGLang's tensor parallel size."""
    kv_tokens: Positive | None = None
    """Capacity of the key-value cache in tokens. Default: on a GPU SGLang's own choice, on a CPU all samples of
    `rollout.max_concurrent_prompts` rows at full length, up to 65536 tokens."""
    max_concurrent_samples: Positive | None = None
    """Samples that a server generates at once; further samples wait in its queue, and each takes the first place that a
    sample leaves. By default all samples of `rollout.max_concurrent_prompts` rows; refused if it is not less. Refused
    with `urls`, whose servers have `--max-running-requests`."""
    memory_fraction: Fraction | None = None
    """Share of the memory of a GPU that is free at the start of a server, for weights and key-value cache; default:
    SGLang's own choice, nearly all of it. The server of a teacher that writes takes its own share of what is left."""
    merge_adapter: bool = False
    """Serve the adapter of [lora] added to the weights of the model, as full sets of weights in the run's precision,
    where servers cannot compute with it beside the weights: `lora.modules_to_save`, experts, and layers other than
    those of attention and MLP. In half precision the sum is rounded."""
    arguments: list[str] = Field(default_factory=list)
    """Additional arguments of `sglang.launch_server`."""

    @model_validator(mode="after")
    def _check_external(self) -> SglangSection:
        if self.urls and self.weights != "disk":
            msg = f'rollout.sglang.weights = "{self.weights}" needs servers that the run starts; use "disk" with urls'
            raise ValueError(msg)
        urls = [url.rstrip("/") for url in self.urls]
        if duplicates := sorted({url for url in urls if urls.count(url) > 1}):
            msg = (
                f"rollout.sglang.urls names {duplicates} more than once: actors that share a server would abort each "
                "other's requests; give each actor its own"
            )
            raise ValueError(msg)
        if self.urls and self.max_concurrent_samples is not None:
            msg = (
                "rollout.sglang.max_concurrent_samples is for servers that the run starts; leave it out, and start the "
                "servers of urls with --max-running-requests"
            )
            raise ValueError(msg)
        if self.api_key_file is not None and not self.urls:
            msg = "rollout.sglang.api_key_file is for urls; servers that the run starts get random keys. Remove it"
            raise ValueError(msg)
        return self


class PromptsSection(PoolSection):
    """[prompts]: admission of rows, by one actor."""

    max_refills: Positive = 100
    """Replacements of one slot of a step since the last start, after dropped or quarantined rows, before the run ends
    with an error."""


class RolloutSection(PoolSection):
    """[rollout]: generation of samples."""

    actor: str = "rollout"
    """Role that writes column `trajectory`: the built-in one, or the dotted path of your own, usually a subclass of
    `relax_actors.roles.episode_rollout.EpisodeRollout`."""
    backend: Annotated[str, Named(INFERENCE_ENGINES)] = "transformers"
    """Inference engine: `transformers`; `sglang`, in servers configured by [rollout.sglang] (`make sglang` installs
    it); `simulated`, which takes the time that [simulate] says; or an engine of another package."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of an inference engine of another package; the built-in engines take none."""
    device: str = "auto"
    """Torch device; "auto" is CUDA if available, else the CPU."""
    group_size: Positive = 8
    """Samples of each prompt; 2 or more if `algorithm.advantage` compares them."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are those of the softmax at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: only the most probable tokens with this total probability are sampled."""
    max_tokens: Positive = 64
    """Maximum length of a completion, in tokens."""
    min_tokens: NonNegativeInt = 0
    """Minimum length of a completion: no stop token is sampled before it, and stop strings of several tokens do not end
    the sample."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a sample, in addition to the end-of-sequence token. A sample ends with the first token that
    completes one of them in the text of its tokens, special tokens included, whatever tokens spell it. The string stays
    in the sample and, unless it is a special token, in its text."""
    max_concurrent_prompts: Positive = 16
    """Prompts that an actor generates for at once; 1 with `run.deterministic`."""
    in_flight_updates: bool | None = None
    """Whether in-flight samples continue with newer weights (partial rollout); the version of each token is recorded.
    If false, a sample is generated by one version. By default true where `staleness.max` is above 0."""
    turn_log_after: NonNegative = 2.0
    """Seconds of a row's work after which the turns of its episodes are written to the table, so that an actor that
    takes the row over continues them; repeating less work than this is cheaper. 0 writes every turn."""
    turn_cache_mib: NonNegativeInt = 256
    """MiB of keys and values that the transformers engine keeps between the turns of episodes; a turn without them
    reads its conversation anew."""
    max_running_tokens: Positive | None = None
    """Tokens of conversations, with what their next turns may add, that an actor generates at once; further turns, and
    requests of agents and of the gateway, wait. By default what fits the key-value cache of an SGLang server together
    with the conversations that wait for their environments; unlimited with other engines."""
    spot_backlog: Positive | None = None
    """Rows that must wait for a rollout before those on nodes started with `relax node --spot` get any; without other
    rollouts they get all rows. Default: `max_concurrent_prompts`, at least 2, and at most half of the rows that are
    admitted at once."""
    sglang: SglangSection = SglangSection()

    @model_validator(mode="after")
    def _token_limits(self) -> RolloutSection:
        if self.min_tokens > self.max_tokens:
            msg = f"rollout.min_tokens = {self.min_tokens} is more than rollout.max_tokens = {self.max_tokens}"
            raise ValueError(msg)
        return self


class RewardSection(PoolSection):
    """[reward]: scoring of samples."""

    gpus: NonNegativeInt = 0
    """GPUs of an actor, for a reward that computes on them; other actors do not get them."""
    actor: str = "reward"
    """Role that writes column `reward`: the built-in one, or the dotted path of your own."""
    function: str | dict[str, float] = "exact_match"
    """Name or dotted path of a reward function, or a table of several with their weights."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of reward functions, also of those in `eval.reward`: a table for each function, by its name in the
    setting."""
    isolation: Literal["none", "sandbox"] = "none"
    """"sandbox" runs the actors without network but the broker, with a read-only view of the Python installation, the
    folder of the configuration, `readable`, the store and the model, and with an empty /tmp; needs bubblewrap."""
    readable: tuple[Path, ...] | None = None
    """Further files and folders that a sandbox shows, read-only."""
    max_processes: Positive | None = None
    """Limit of processes and threads in a sandbox; unlimited if not set. For root it needs a control group."""
    components: tuple[str, ...] | None = None
    """Names of the reward components that every row has, for a reward role of your own, or functions that return
    components. By default the keys of `function` if it is a table, else none."""

    @field_validator("components")
    @classmethod
    def _distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = value or ()
        if "" in names or len(set(names)) < len(names):
            msg = "reward.components must be distinct, non-empty names"
            raise ValueError(msg)
        return value


class ExamplesSection(PoolSection):
    """[examples]: from rows of the data to tokens, where `algorithm.rows` says that rows come from data."""

    train: Literal["completion", "all"] | tuple[str, ...] = "completion"
    """Tokens to train: the answer, or the last message of a conversation; all; or the messages of these roles, such as
    `["assistant"]`. A message with `train = false` is never trained, one with `train = true` always."""
    step_separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text behind each step of an answer, where a process reward model is read, with `algorithm.rows = "steps"`."""


class AdvantagesSection(PoolSection):
    """[advantages]: from the rewards of a group to advantages."""

    reads: str = "reward"
    """Column with the rewards: that of the reward role, or of a role that reshapes them."""


class RoleSection(BaseModel):
    """[roles.<name>]: an additional role; keys other than these are options of its class. The built-in roles
    `reference`, `actor_fwd` and `squares` need no `actor`; their options are `max_concurrent_rows` (default 8),
    `device` (default "auto") and `backend` (a scoring engine, default "torch").
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    actor: str
    """Dotted path of the class, or the name under which an installed package registers it. By default the role
    registered as `<name>`, if there is one."""
    replicas: Positive = 1
    """Number of actors, each a process."""
    deadline: PositiveFloat = 60.0
    """Seconds without progress after which an actor counts as hung, is killed and replaced."""
    memory_limit_mib: Positive | None = None
    """Memory limit of an actor's process, without weights that it shares with other actors; a row that exceeds it
    fails. Unlimited if not set."""
    gpus: NonNegativeInt | None = None
    """GPUs of an actor, which other actors do not get. By default 1 for a role that computes on a device, else 0."""
    secrets: tuple[str, ...] | None = None
    """Names of environment variables with secrets that this role's actors get, e.g. `["OPENAI_API_KEY"]`. Other
    variables named like a secret (`*_TOKEN`, `*_KEY`, `*_PASSWORD` and the like), or with a password in a URL, are
    kept from them."""
    isolation: Literal["none", "sandbox"] = "none"
    """"sandbox" runs the actors without network but the broker, with a read-only view of the Python installation, the
    folder of the configuration, `readable`, the store and the model, and with an empty /tmp; needs bubblewrap."""
    readable: tuple[Path, ...] | None = None
    """Further files and folders that a sandbox shows, read-only."""
    max_processes: Positive | None = None
    """Limit of processes and threads in a sandbox; unlimited if not set. For root it needs a control group."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of the class."""
        return dict(self.model_extra or {})
