"""TRL's side of `sft_vs_trl.py`: `python sft_trl_side.py STAGE WORKLOAD.json RESULT.json`, in an environment with TRL.

Settings equal those of relax-actors' side: constant learning rate, no weight decay, float32, the loss over the tokens
of the answers alone. Examples are packed (`bfd`) and pairs are free of padding, as TRL advises; gradient checkpointing
is off. Nothing is saved or reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_trl_side import Ends
from grpo_workload import Workload
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

PACKED = 2048
"""Tokens of a packed sequence."""


class Tokens(Ends):
    """Counts the tokens of the batches, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.seen = 0

    def counted(self, collate: Any) -> Any:
        """Return a collator that counts what it returns."""

        def count(rows: Any) -> Any:
            batch = collate(rows)
            mask = batch.get("attention_mask")
            self.tokens.append(int(batch["input_ids"].numel() if mask is None else mask.sum()))
            return batch

        return count


def main() -> None:
    """Train for the workload's steps; write the end times of the steps, their tokens and losses."""
    stage, work, result = sys.argv[1], Workload.load(Path(sys.argv[2])), Path(sys.argv[3])
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    rows = [json.loads(line) for line in work.prompts.read_text().splitlines()]
    settings: dict[str, Any] = {
        "output_dir": str(result.with_suffix(".trl")),
        "gradient_accumulation_steps": 1,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": work.steps,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": work.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer, "train_dataset": Dataset.from_list(rows)}
    ends = Tokens()
    trainer: Any
    if stage == "sft":
        packing = {"packing": True, "packing_strategy": "bfd", "max_length": PACKED, "completion_only_loss": True}
        size = {"per_device_train_batch_size": max(1, work.rows * work.prompt_tokens // PACKED)}
        trainer = SFTTrainer(args=SFTConfig(**settings, **packing, **size), callbacks=[ends], **common)
    else:
        size = {"per_device_train_batch_size": work.rows, "max_length": PACKED, "padding_free": True}
        trainer = DPOTrainer(args=DPOConfig(**settings, **size), callbacks=[ends], **common)
    trainer.data_collator = ends.counted(trainer.data_collator)
    trainer.train()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    body = {"times": ends.times, "tokens": ends.tokens[: work.steps], "losses": losses, "versions": versions}
    result.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
