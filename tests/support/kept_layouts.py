"""Short runs of different algorithms, rows and layouts of ranks, of which every step is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.adapters import base_folder
from tests.support.gateways import AGENTS
from tests.support.kept_runs import KEPT
from tests.support.running import IMAGES, SUPPORT, TINY, Run

EVERY = ("run.keep_steps=100", "trainer.checkpoint_every=2")
STEPS = 6
"""Steps of each run."""
PPO = (
    *("algorithm.name=ppo", "algorithm.kl.place=none", "critic.learning_rate=1e-3"),
    *("trainer.minibatches=2", "trainer.epochs=2", "algorithm.proximal=trainer"),
)
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SPLIT = {"num_attention_heads": 4, "num_key_value_heads": 2}
TWO = ("trainer.backend=megatron", "trainer.megatron.ranks=2")
PICK = (
    *("environment.name=tiny_pick.Pick", "data.function=tiny_pick.make", "rollout.max_tokens=2"),
    "reward.function=environment",
)
DUEL = (
    *("agent.function=tiny_agents.duel", "agent.players=['solver', 'critic']", "agent.trained=['critic']"),
    "reward.function=environment",
)


def _architecture(values: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"model.architecture.{name}={value}" for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Layout:
    """Settings of a run, and its models."""

    settings: tuple[str, ...]
    config: Path = TINY
    models: tuple[str, ...] = ("policy",)
    trains_adapter: bool = False

    def run(self, folder: Path) -> Run:
        """Return the run, not started yet."""
        settings = [*self.settings, f"run.steps={STEPS}", *EVERY]
        if self.trains_adapter:
            settings.append(f"model.path={base_folder(folder)}")
        return Run(folder, "kept", settings, self.config)


LAYOUTS = {
    "ranks of torch, critic": Layout(
        (*KEPT, *PPO, "trainer.torch.ranks=2", "critic.torch.ranks=2"), models=("policy", "critic")
    ),
    "adapter": Layout(
        (*KEPT, *("rollout.group_size=4", "rollout.max_tokens=6", "reward.function=tiny_tasks.share_of_sevens")),
        SUPPORT / "tiny_adapter.toml",
        trains_adapter=True,
    ),
    "episodes, not deterministic": Layout((*PICK, "staleness.max=2")),
    "agents": Layout((*KEPT, *DUEL), AGENTS),
    "images": Layout((*KEPT, "trainer.max_tokens_per_microbatch=128"), IMAGES),
    "examples, ranks of torch": Layout(("trainer.torch.ranks=2", "run.epochs=2"), SUPPORT / "tiny_examples.toml"),
    "pairs": Layout(
        ("algorithm.name=dpo", "data.function=tiny_tasks.pairs", "roles.reference.replicas=1", "run.epochs=2"),
        SUPPORT / "tiny_examples.toml",
    ),
    "megatron": Layout((*KEPT, "trainer.backend=megatron")),
    "megatron, tensor parallel": Layout((*KEPT, *TWO, "trainer.megatron.tensor_parallel=2", *_architecture(SPLIT))),
    "megatron, data parallel": Layout((*KEPT, *TWO, "trainer.max_tokens_per_microbatch=64")),
    "megatron, expert parallel": Layout(
        (*KEPT, *TWO, "trainer.megatron.expert_parallel=2", "trainer.router_replay=true", *_architecture(EXPERTS))
    ),
}
"""Settings by a name for tests."""
