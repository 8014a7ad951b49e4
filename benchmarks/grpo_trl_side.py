"""TRL's side of `grpo_vs_trl.py`: `python grpo_trl_side.py WORKLOAD.json RESULT.json`, in TRL's environment.

Settings equal those of relax-actors' side: constant learning rate, no weight decay, no KL term, the loss normalised
over the step's tokens (TRL's default), float32, one optimizer step per batch of completions. Gradient checkpointing,
TRL's default, is off: it is slower and saves memory that this model does not need. Nothing is saved or reported.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_workload import Workload, trl_digits
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Ends(TrainerCallback):
    """Records the end of each step, in Unix seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_args: Any, **_keywords: Any) -> None:
        """Called by the trainer after the optimizer's step, before it logs."""
        self.times.append(time.time())


def adapter_of(work: Workload) -> Any:
    """Return PEFT's settings of the adapter; None to train all weights."""
    if not work.lora_rank:
        return None
    from peft import LoraConfig  # noqa: PLC0415 an environment without it can train all weights

    rank = work.lora_rank
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    """Train for the workload's steps; write the end times of the steps, the rewards and the lengths."""
    work, result = Workload.load(Path(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    rows = [json.loads(line) for line in work.prompts.read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=str(result.with_suffix(".trl")),
        per_device_train_batch_size=work.completions,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_steps=work.steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=work.precision == "bfloat16",
        use_cpu=work.device == "cpu",
        seed=work.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    ends = Ends()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=trl_digits,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[ends],
        peft_config=adapter_of(work),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    body = {
        "times": ends.times,
        "rewards": [entry["reward"] for entry in logged],
        "lengths": [entry["completions/mean_length"] for entry in logged],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
    }
    result.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
