"""All registries with their built-in entries, one line for each.

Advantage estimators and policy losses are the functions with a spec in their modules, and add no line.

Packages register theirs as entry points, e.g. in their pyproject.toml:

    [project.entry-points."relax_actors.rewards"]
    my_reward = "my_package.rewards:my_reward"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_actors.registry.registry import Registry

ROLES: Registry[type] = Registry(
    "role",
    "relax_actors.roles",
    {
        "prompts": "relax_actors.roles.prompts:PromptSource",
        "media": "relax_actors.roles.media:MediaRole",
        "examples": "relax_actors.roles.examples:Examples",
        "rollout": "relax_actors.roles.rollout:Rollout",
        "environment": "relax_actors.roles.environment:EnvironmentRole",
        "gateway": "relax_actors.roles.gateway:GatewayRole",
        "autoscaler": "relax_actors.roles.autoscaler:Autoscaler",
        "agent": "relax_actors.roles.agent:AgentRole",
        "reward": "relax_actors.roles.reward:RewardRole",
        "advantages": "relax_actors.roles.advantages:Advantages",
        "trainer": "relax_actors.roles.trainer:Trainer",
        "trainer_rank": "relax_actors.roles.trainer_rank:TrainerRank",
        "critic": "relax_actors.roles.critic:Critic",
        "evaluator": "relax_actors.roles.evaluator:Evaluator",
        "held_out": "relax_actors.roles.held_out:HeldOut",
        "reference": "relax_actors.roles.scorer:Reference",
        "actor_fwd": "relax_actors.roles.scorer:ActorFwd",
        "squares": "relax_actors.roles.scorer:Squares",
        "teacher": "relax_actors.roles.teacher:Teacher",
        "reward_model": "relax_actors.roles.reward_model:RewardModel",
        "judge": "relax_actors.roles.judge:Judge",
    },
)
ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    "advantage estimator",
    "relax_actors.advantage_estimators",
    modules=[
        f"relax_actors.algorithms.advantages.{name}" for name in ("baselines", "turns", "returns", "token_baseline")
    ],
)
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy loss",
    "relax_actors.policy_losses",
    modules=[
        f"relax_actors.algorithms.surrogates.{name}"
        for name in (
            "clipped",
            "smooth",
            "weighted",
            "covariance",
            "proximity",
            "supervised",
            "preference",
            "labels",
            "scores",
        )
    ],
)
CORRECTIONS: Registry[Callable[..., Any]] = Registry(
    "off-policy correction",
    "relax_actors.corrections",
    dict.fromkeys(("none", "importance", "tis", "icepop"), "relax_actors.algorithms.corrections:correction_weights"),
)
REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward function",
    "relax_actors.rewards",
    {
        "character_error_rate": "relax_actors.rewards._error_rate:character_error_rate",
        "code_tests": "relax_actors.rewards.code.reward:CodeTests",
        "environment": "relax_actors.rewards.credit:environment",
        "exact_match": "relax_actors.rewards._text:exact_match",
        "format_match": "relax_actors.rewards._form:format_match",
        "iou": "relax_actors.rewards._boxes:iou",
        "json_schema": "relax_actors.rewards._form:json_schema",
        "judge": "relax_actors.rewards.remote.judge:Judge",
        "length_limits": "relax_actors.rewards._form:length_limits",
        "math_verify": "relax_actors.rewards._math_verify:math_verify",
        "multiple_choice": "relax_actors.rewards._choice:multiple_choice",
        "normalised_match": "relax_actors.rewards._overlap:normalised_match",
        "numeric_match": "relax_actors.rewards._numeric:numeric_match",
        "positional_match": "relax_actors.rewards._text:positional_match",
        "recorded": "relax_actors.rewards._recorded:recorded",
        "reasoning_gym_score": "relax_actors.rewards._reasoning_gym:reasoning_gym_score",
        "remote": "relax_actors.rewards.remote.reward:Remote",
        "repetition": "relax_actors.rewards._form:repetition",
        "temporal_iou": "relax_actors.rewards._intervals:temporal_iou",
        "token_f1": "relax_actors.rewards._overlap:token_f1",
        "word_error_rate": "relax_actors.rewards._error_rate:word_error_rate",
    },
)
ENVIRONMENTS: Registry[type] = Registry(
    "environment",
    "relax_actors.environments",
    {
        "gymnasium": "relax_actors.envs.adapters.gymnasium:GymnasiumEnvironment",
        "images": "relax_actors.envs.tools.images:ImageEnvironment",
        "mcp": "relax_actors.envs.adapters.mcp:McpEnvironment",
        "openenv": "relax_actors.envs.adapters.openenv:OpenEnvEnvironment",
        "python": "relax_actors.envs.tools.python:PythonEnvironment",
        "reasoning_gym": "relax_actors.envs.adapters.reasoning_gym:ReasoningGymEnvironment",
    },
)
DATA_SOURCES: Registry[Callable[..., Any]] = Registry(
    "data source",
    "relax_actors.data_sources",
    {
        "jsonl": "relax_actors.data.jsonl:open_jsonl",
        "parquet": "relax_actors.data.parquet:Parquet",
        "arrow": "relax_actors.data.arrow:ArrowFiles",
        "reasoning_gym": "relax_actors.data.reasoning_gym:open_reasoning_gym",
        "python": "relax_actors.data.python:FunctionTasks",
        "traces": "relax_actors.data.traces:open_traces",
        "mixture": "relax_actors.data.mixture:open_mixture",
    },
)
INFERENCE_ENGINES: Registry[Any] = Registry(
    "inference engine",
    "relax_actors.inference_engines",
    {
        "transformers": "relax_actors.engines.transformers.backend:TransformersBackend",
        "sglang": "relax_actors.engines.sglang.backend:SglangBackend",
        "simulated": "relax_actors.simulation.backends:SimulatedInferenceBackend",
    },
    attributes=("build", "check", "server", "footprint"),
)
TRAINING_ENGINES: Registry[Any] = Registry(
    "training engine",
    "relax_actors.training_engines",
    {
        "torch": "relax_actors.engines.torch.backend:TorchTrainingBackend",
        "megatron": "relax_actors.engines.megatron.backend:MegatronTrainingBackend",
        "simulated": "relax_actors.simulation.backends:SimulatedTrainingBackend",
    },
    attributes=("build", "check", "footprint"),
)
SCORING_ENGINES: Registry[Any] = Registry(
    "scoring engine",
    "relax_actors.scoring_engines",
    {
        "torch": "relax_actors.engines.torch.backend:TorchScoringBackend",
        "megatron": "relax_actors.engines.megatron.backend:MegatronScoringBackend",
    },
    attributes=("build", "check"),
)
CRITIC_ENGINES: Registry[Any] = Registry(
    "critic engine",
    "relax_actors.critic_engines",
    {
        "torch": "relax_actors.engines.torch.backend:TorchCriticBackend",
        "megatron": "relax_actors.engines.megatron.backend:MegatronCriticBackend",
    },
    attributes=("build", "check", "footprint"),
)
WEIGHT_TRANSPORTS: Registry[Any] = Registry(
    "weight transport",
    "relax_actors.weight_transports",
    {
        "store": "relax_actors.weights.transports.store:StoreTransport",
    },
    attributes=("make_sender", "make_receiver", "check"),
)

ALL: tuple[Registry[Any], ...] = (
    ROLES,
    ADVANTAGES,
    POLICY_LOSSES,
    CORRECTIONS,
    REWARDS,
    ENVIRONMENTS,
    DATA_SOURCES,
    INFERENCE_ENGINES,
    TRAINING_ENGINES,
    SCORING_ENGINES,
    CRITIC_ENGINES,
    WEIGHT_TRANSPORTS,
)
