"""Kinds of runs that are killed and compared with an undisturbed one: their configurations and settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from broker.subjects import RowId
from relax_actors.config import load_config
from relax_actors.data.prompt_maker import open_data
from relax_actors.runtime.row_order import RowOrder
from tests.chaos.kill_plan import CHECKPOINT_EVERY, ROWS_OF_DATA
from tests.support.adapters import base_folder
from tests.support.faults import Story
from tests.support.running import IMAGES, SUPPORT, TINY

EXAMPLES, ADAPTER = SUPPORT / "tiny_examples.toml", SUPPORT / "tiny_adapter.toml"
SAMPLED = ("staleness.max=0", "rollout.max_tokens=24", "reward.function=tiny_tasks.slow_share_of_sevens")
KILLED = (
    "run.deterministic=true",
    "trainer.max_tokens_per_microbatch=64",
    f"trainer.checkpoint_every={CHECKPOINT_EVERY}",
    "supervision.intensity=100000",
    "supervision.backoff_max=0.3",
    "supervision.ack_wait=1",
)
SETTINGS = (*SAMPLED, *KILLED)
DATA_ROWS, STEP_ROWS = 30, 8
"""Rows of the data in `EXAMPLES`, and rows of a step."""
SPARE = 3
"""How many times the steps that its kills need a run on rows of the data makes."""
UPDATES = ("trainer.minibatches=2", "trainer.epochs=2", "algorithm.proximal=trainer")
TURNS = (
    "environment.options.pause=0.05",
    "data.function=tiny_pick.make",
    "rollout.max_tokens=2",
    "rollout.turn_log_after=0",
    "reward.function=environment",
)


SQUARES = (
    """model.architecture={model_type = "gemma3", mm_tokens_per_image = 4,
    text_config = {hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2,
    max_position_embeddings = 128, sliding_window = 8, layer_types = ["sliding_attention", "full_attention"]},
    vision_config = {hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2,
    image_size = 32, patch_size = 8, vision_use_head = false}}""".replace("\n", ""),
    'model.tokenizer.alphabet="0123456789>#<. second\\n"',
    "media.image={}",
    "media.video={}",
)


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        settings: besides those of all kinds.
        config: configuration file.
    """

    settings: tuple[str, ...] = ()
    config: Path = TINY


KINDS = {
    "grpo": Kind(),
    "updates": Kind(UPDATES),
    "turns": Kind(("environment.name=tiny_pick.Pick", *TURNS)),
    "players": Kind(("environment.name=tiny_duel.Duel", "environment.players=['solver', 'critic']", *TURNS)),
    "images": Kind(("trainer.max_tokens_per_microbatch=128",), IMAGES),
    "squares": Kind(("trainer.max_tokens_per_microbatch=128", *SQUARES), IMAGES),
    "ppo": Kind((*UPDATES, "algorithm.name=ppo", "algorithm.kl.place=none", "critic.learning_rate=1e-3")),
    "sft": Kind((), EXAMPLES),
    "dpo": Kind(("algorithm.name=dpo", "data.function=tiny_tasks.pairs", "roles.reference.replicas=1"), EXAMPLES),
    "reward_model": Kind(("algorithm.name=reward_model", "data.function=tiny_tasks.pairs"), EXAMPLES),
    "lora": Kind(("rollout.group_size=4",), ADAPTER),
}
"""Kinds by the name of the algorithm."""


def settings_of(algorithm: str, steps: int, folder: Path) -> list[str]:
    """Return the settings of a run of at least so many steps; runs on rows of the data make whole epochs.

    Args:
        algorithm: key of `KINDS`.
        steps: number of steps.
        folder: where the base model of an adapter is written.
    """
    kind = KINDS[algorithm]
    if algorithm in ROWS_OF_DATA:
        return [*KILLED, *kind.settings, f"run.epochs={epochs_of(steps)}"]
    base = [f"model.path={base_folder(folder)}"] if kind.config == ADAPTER else []
    return [*SETTINGS, *kind.settings, *base, f"run.steps={steps}"]


def epochs_of(steps: int) -> int:
    """Return the epochs of a run on rows of the data; a step is short, so that it makes more steps than it must."""
    return -(-SPARE * steps * STEP_ROWS // DATA_ROWS)


def rows_of_data(story: Story) -> Counter[int]:
    """Return how often each row of the data of `EXAMPLES` was trained, from the rows that batches name."""
    order = RowOrder(config := load_config(EXAMPLES), open_data(config.data))
    rows = [RowId(step, index) for step, batch in story.values("batch").items() for index in batch.rows]
    return Counter(order.item(row) for row in rows)
