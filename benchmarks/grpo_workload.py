"""Workload of both sides of `grpo_vs_trl.py` and `ppo_vs_trl.py`: one model folder, one file of prompts, one reward.

Runs in both environments, so the module imports only the standard library at the top.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ALPHABET = "".join(map(chr, range(32, 127))) + "ÄÖÜäöüßé"
END = "#"
ARCHITECTURE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a step and settings of the algorithm; `folder` holds the model, the prompts and the results."""

    folder: str
    steps: int
    rows: int = 8
    samples: int = 8
    prompt_tokens: int = 16
    new_tokens: int = 32
    learning_rate: float = 1e-3
    threads: int = 1
    seed: int = 1
    epochs: int = 1
    device: str = "cpu"
    precision: str = "float32"
    rollouts: int = 1
    """Rollout actors of relax-actors, each a process."""
    lora_rank: int = 0
    """Rank of an adapter of all linear layers, with alpha twice the rank; 0 to train all weights."""
    architecture: dict[str, Any] = field(default_factory=lambda: dict(ARCHITECTURE))

    @property
    def model(self) -> Path:
        """Hugging Face folder with random float32 weights."""
        return Path(self.folder) / "model"

    @property
    def prompts(self) -> Path:
        """JSON Lines file with one `prompt` of `prompt_tokens` characters per line."""
        return Path(self.folder) / "prompts.jsonl"

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.rows * self.samples

    def save(self) -> Path:
        """Write the workload for the other side's process; return the path."""
        path = Path(self.folder) / "workload.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))

    def make(self) -> None:
        """Create the model folder and the prompts; needs torch and relax_actors."""
        from relax_actors.data.character_tokenizer import make_character_tokenizer  # noqa: PLC0415
        from relax_actors.engines.torch.model import build  # noqa: PLC0415

        self.model.mkdir(parents=True)
        ids = make_character_tokenizer(ALPHABET, END, self.model)
        (self.model / "config.json").write_text(json.dumps(ids | {"bos_token_id": None} | self.architecture, indent=1))
        build(self.model, seed=self.seed).save_pretrained(self.model)
        source = random.Random(self.seed)  # noqa: S311 not a secret
        letters = ALPHABET.replace(END, "")
        lines = ("".join(source.choices(letters, k=self.prompt_tokens)) for _ in range(self.rows * self.steps))
        self.prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))


def digits(completion: str, prompt: Any = None) -> float:  # noqa: ARG001 relax_actors passes it
    """Return the reward: the fraction of a completion's characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def trl_digits(completions: list[str], **_: Any) -> list[float]:
    """Return the same rewards in TRL's form."""
    return [digits(completion) for completion in completions]
