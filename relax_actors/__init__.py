"""Reinforcement-learning post-training as an actor system on NATS JetStream.

Names for custom roles, rewards, environments and algorithms, imported on first use: `import relax_actors` itself costs
next to nothing, and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from relax_actors.algorithms.advantages import Group
    from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
    from relax_actors.algorithms.specs import AdvantageSpec, LossSpec
    from relax_actors.data.task import Medium, Task
    from relax_actors.engines.protocols import Generation
    from relax_actors.envs import Environment, Step
    from relax_actors.envs.media_bytes import png_of
    from relax_actors.envs.tools import ToolEnvironment
    from relax_actors.envs.tools.images import images_of, zoomed
    from relax_actors.errors import CodecError, ConfigError, RelaxError, RowError
    from relax_actors.messages import (
        NOT_SAMPLED,
        Advantage,
        FinishReason,
        PreparedPrompt,
        Prompt,
        Reward,
        Sample,
        TokenSequence,
        Trajectory,
    )
    from relax_actors.monitoring.connection import Connected, connected
    from relax_actors.monitoring.sinks import LogMessage, Sink
    from relax_actors.registry import RoleSpec
    from relax_actors.rewards.score import Score
    from relax_actors.roles.episode_rollout import EpisodeRollout, Generate
    from relax_actors.runtime import Drop, Role, Row, StatefulRole
    from relax_actors.runtime.cells import put_own
    from relax_actors.serving.session_client import AgentResult, AgentTask, TaskEnvironment
else:
    __getattr__ = lazy(__name__)

__version__ = "0.1.0"

__all__ = [
    "NOT_SAMPLED",
    "Advantage",
    "AdvantageSpec",
    "AgentResult",
    "AgentTask",
    "CodecError",
    "ConfigError",
    "Connected",
    "Drop",
    "Environment",
    "EpisodeRollout",
    "FinishReason",
    "Generate",
    "Generation",
    "Group",
    "LogMessage",
    "LossSpec",
    "Medium",
    "PolicyInputs",
    "PolicyLoss",
    "PreparedPrompt",
    "Prompt",
    "RelaxError",
    "Reward",
    "Role",
    "RoleSpec",
    "Row",
    "RowError",
    "Sample",
    "Score",
    "Sink",
    "StatefulRole",
    "Step",
    "Task",
    "TaskEnvironment",
    "TokenSequence",
    "ToolEnvironment",
    "Trajectory",
    "connected",
    "images_of",
    "png_of",
    "put_own",
    "zoomed",
]
