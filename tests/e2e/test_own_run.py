"""The page "My model, my data, my reward, my GPUs": its files train a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from tests.support.chat_folder import make_chat_folder
from tests.support.models import QWEN3
from tests.support.running import Run, relax

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_run"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORT = (
    "run.steps=2",
    "eval.rows=4",
    "eval.every=0",
    "rollout.group_size=2",
    "rollout.max_tokens=4",
    "trainer.prompts_per_step=2",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as on the page: the example's files, and a model as `save_pretrained` writes it."""
    folder = tmp_path / "my-run"
    shutil.copytree(EXAMPLE, folder)
    tokenizer = make_chat_folder(folder / "model", TEMPLATE, ["<|im_end|>"])
    size = max(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"].values()) + 1
    torch.manual_seed(0)
    config = Qwen3Config(**QWEN3 | {"vocab_size": size, "max_position_embeddings": 512})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    make_chat_folder(folder / "model", TEMPLATE, ["<|im_end|>"])
    return folder


@pytest.mark.slow
def test_own_model_data_and_reward_are_checked_and_trained(folder: Path, tmp_path: Path) -> None:
    checked = relax("check", str(folder / "run.toml"), *SHORT, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    run = Run(tmp_path, "my-run", list(SHORT), config=folder / "run.toml")
    result = run.complete()
    assert (result["steps"], result["trained"], result["quarantined"]) == (2, 4, 0)
    model = AutoModelForCausalLM.from_pretrained(run.folder.model)
    assert AutoTokenizer.from_pretrained(run.folder.model)("What is 51 + 28?").input_ids
    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
