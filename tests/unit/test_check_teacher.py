"""Checks of the teacher before a run starts: every impossible combination names the reason and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_actors.checks import examine
from relax_actors.checks.capacity import memory_of_roles
from relax_actors.config import load_config
from relax_actors.data.model_folder import measure, prepare
from relax_actors.errors import ConfigError
from relax_actors.roles.taught_rollout import is_taught
from tests.support.http_servers import served
from tests.support.messages import assert_says
from tests.support.running import IMAGES, TINY

Errors = Callable[..., tuple[str, ...]]
ON = "algorithm.distil.place=advantage"

WRITES = ("algorithm.name=opd", "algorithm.distil={place='loss', kind='forward_kl', student_share=0.5, top_k=3}")
OTHER = "relax_actors.engines.torch.backend.TorchScoringBackend"
"""A scoring engine by its path, as one of another package."""


@pytest.fixture
def errors(tmp_path: Path) -> Errors:
    """Errors of the tiny configuration with settings."""

    def find(*settings: str) -> tuple[str, ...]:
        try:
            config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", *settings])
        except ConfigError as error:
            return (str(error).removeprefix(f"{TINY}: "),)
        return examine(config).errors

    return find


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Folder of a model with the vocabulary of the tiny configuration; its weights are never read here."""
    folder = tmp_path / "teacher"
    prepare(load_config(TINY, []), folder)
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def test_teacher_in_a_folder_on_a_server_or_with_a_hint_is_accepted(errors: Errors, teacher: Path) -> None:
    for option in (f"model={teacher}", "server=http://127.0.0.1:1", "hint='{answer}{prompt}'"):
        assert errors(ON, f"roles.teacher.{option}") == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [ON],
            (
                'algorithm.distil.place = "advantage" needs a teacher; add [roles.teacher] with model = "<folder>", '
                "server = <URL>, or hint for self-distillation"
            ),
        ),
        (
            ["roles.teacher.hint='{prompt}'"],
            '[roles.teacher] has no effect without algorithm.distil.place; set it to "advantage" or "loss"',
        ),
        (
            [ON, "roles.teacher.replicas=1"],
            (
                "[roles.teacher] without model and server is the policy itself, which has nothing to teach; set model "
                "or server, or a hint that it reads and the student does not (self-distillation)"
            ),
        ),
        (
            [ON, "roles.teacher.server=http://127.0.0.1:1", "rollout.temperature=0.8"],
            "at rollout.temperature = 0.8; set roles.teacher.model, or rollout.temperature = 1",
        ),
        (
            [ON, "roles.teacher.server=localhost"],
            "roles.teacher.server = 'localhost' is not a URL such as http://127.0.0.1:30000",
        ),
        (
            [ON, "roles.teacher.hint='the answer is {answer}'"],
            "roles.teacher.hint 'the answer is {answer}' lacks {prompt}, where the teacher reads the prompt; add it",
        ),
        (
            [ON, "roles.teacher.hint='{prompt}'"],
            (
                "roles.teacher.hint '{prompt}' adds nothing to the prompt; write text around {prompt} that the student "
                "does not read, or remove the hint"
            ),
        ),
        (
            [ON, "roles.teacher.hint='{answer} {prompt}'"],
            (
                "roles.teacher.hint '{answer} {prompt}' has text that the model cannot read: character ' ' at position "
                "1 of ' ' is not in the model's alphabet"
            ),
        ),
        (
            [
                "algorithm.distil.place=loss",
                "algorithm.distil.kind=jsd",
                "algorithm.distil.top_k=99",
                "roles.teacher.hint='{answer}{prompt}'",
            ],
            "algorithm.distil.top_k = 99 is more than the vocabulary of ",
        ),
        (
            [ON, "roles.teacher.hint='{prompt'"],
            (
                "roles.teacher.hint '{prompt' is not a template: expected '}' before end of string; write {{ and "
                "}} for braces"
            ),
        ),
        (
            [ON, "roles.teacher.hint='{answer}{prompt}'", f"roles.teacher.backend={OTHER}"],
            f'roles.teacher.backend = "{OTHER}" scores no most likely tokens; set "torch" or "megatron"',
        ),
        (
            [ON, "roles.teacher.hint='{answer}{prompt}'", "roles.teacher.api_key_file=/nowhere"],
            "roles.teacher.api_key_file is the key of a server; set roles.teacher.server, or remove it",
        ),
        (
            ["algorithm.distil.place=loss", "algorithm.distil.kind=jsd", "roles.teacher.hint='{prompt}'"],
            (
                'algorithm.distil: kind = "jsd" compares distributions and needs top_k, e.g. 64; only "reverse_kl" can '
                "be estimated at the sampled token"
            ),
        ),
    ],
)
def test_impossible_teachers_are_refused(errors: Errors, settings: list[str], message: str) -> None:
    assert message in " ".join(errors(*settings))


def test_teacher_with_weights_may_write_samples(errors: Errors, teacher: Path) -> None:
    model = f"roles.teacher.model={teacher}"
    assert errors(*WRITES, model) == ()
    assert errors(*WRITES, model, "roles.teacher.hint='{answer}{prompt}'") == ()
    assert "needs its weights" in " ".join(errors(*WRITES, "roles.teacher.hint='{answer}{prompt}'"))
    assert "student_share = 0.5 has no effect" in " ".join(errors(ON, "algorithm.distil.student_share=0.5", model))


def test_memory_of_a_teacher_that_writes_counts_in_each_rollout(tmp_path: Path, teacher: Path) -> None:
    settings = ("rollout.device=cpu", "rollout.replicas=3", f"roles.teacher.model={teacher}", *WRITES)
    run = f"run.folder={tmp_path / 'run'}"
    writing = load_config(TINY, [run, *settings])
    scoring = load_config(TINY, [run, *settings, "algorithm.distil.student_share=1"])
    facts = measure(teacher)
    sizes = [memory_of_roles(config, facts) for config in (writing, scoring)]
    assert sizes[0].pop("rollout") - sizes[1].pop("rollout") == 3 * 4 * facts.parameters
    assert sizes[0] == sizes[1]
    served = load_config(TINY, [run, *settings, "rollout.backend=sglang"])
    alone = served.model_copy(update={"algorithm": scoring.algorithm})
    assert memory_of_roles(served, facts)["rollout"] - memory_of_roles(alone, facts)["rollout"] > 3 << 30


def test_server_of_the_policy_leaves_memory_to_that_of_a_teacher_that_writes(errors: Errors, teacher: Path) -> None:
    run = (*WRITES, f"roles.teacher.model={teacher}", "rollout.backend=sglang", "rollout.device=cuda")
    assert "set rollout.sglang.memory_fraction" in " ".join(errors(*run))
    assert "memory_fraction" not in " ".join(errors(*run, "rollout.sglang.memory_fraction=0.5"))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_seed_alone_decides_which_rows_the_teacher_writes(share: float) -> None:
    distil = f"algorithm.distil={{place='loss', kind='forward_kl', top_k=3, student_share={share}}}"
    config = load_config(TINY, ["algorithm.name=opd", distil])
    taught = [is_taught(config, step, index) for step in range(100) for index in range(20)]
    # 2,000 draws: the standard deviation of the share is below 0.011.
    assert abs(1 - share - sum(taught) / len(taught)) < 0.05
    other = load_config(TINY, ["algorithm.name=opd", distil, "run.seed=99"])
    assert taught == [is_taught(config, step, index) for step in range(100) for index in range(20)]
    assert (taught == [is_taught(other, step, index) for step in range(100) for index in range(20)]) == (share != 0.3)


def test_a_teacher_cannot_score_more_tokens_than_can_be_sampled(tmp_path: Path) -> None:
    distil = ["algorithm.distil.place=loss", "algorithm.distil.kind=jsd", f"roles.teacher.model={tmp_path / 'teacher'}"]
    tokenizer = load_config(IMAGES).model.tokenizer
    assert tokenizer is not None
    vocabulary = len(tokenizer.alphabet) + 1 + 4
    for count, refused in ((vocabulary - 3, True), (vocabulary - 4, False)):
        config = load_config(
            IMAGES,
            [f"run.folder={tmp_path / 'run'}", *distil, f"algorithm.distil.top_k={count}"],
        )
        said = (
            f"algorithm.distil.top_k = {count} is more than the vocabulary of {vocabulary - 4} without the tokens of "
            "media; lower it"
        )
        assert (said in examine(config).errors) is refused


def test_a_teacher_on_a_server_does_not_read_media_and_one_with_a_hint_does(tmp_path: Path) -> None:
    distil = ["algorithm.distil.place=loss", f"run.folder={tmp_path / 'run'}"]
    said = "roles.teacher.server works with text only, and this model takes media; set roles.teacher.model or a hint"
    for option, errors in (("server=http://127.0.0.1:1", (said,)), ("hint='7{prompt}'", ())):
        found = examine(load_config(IMAGES, [*distil, f"roles.teacher.{option}"])).errors
        assert tuple(error for error in found if "teacher" in error) == errors


def test_folder_without_a_model_or_with_another_vocabulary_is_refused(errors: Errors, teacher: Path) -> None:
    option = f"roles.teacher.model={teacher}"
    assert errors(ON, option, "roles.teacher.server=http://127.0.0.1:1") == (
        "roles.teacher has both model and server; remove one",
    )
    (error,) = errors(ON, option, "model.tokenizer.alphabet=0123456789>#x")
    assert_says(error, f"roles.teacher.model {teacher}", "'x' is id 12", "same tokenizer")
    (teacher / "model.safetensors").unlink()
    (error,) = errors(ON, option)
    where = f"roles.teacher.model {teacher}"
    assert_says(error, where, "*.safetensors", "runs/demo/model")
    shutil.rmtree(teacher)
    (error,) = errors(ON, option)
    assert_says(error, where, "does not exist", "runs/demo/model")


def test_server_with_another_vocabulary_is_refused(errors: Errors, teacher: Path) -> None:
    with served({"/model_info": json.dumps({"tokenizer_path": str(teacher)}).encode()}) as url:
        option = f"roles.teacher.server={url}"
        assert errors(ON, option) == ()
        (error,) = errors(ON, option, "model.tokenizer.alphabet=0123456789>#x")
    assert_says(error, f"roles.teacher.server {url}", teacher, "'x' is id 12", "same tokenizer")


def test_server_whose_vocabulary_cannot_be_checked_is_noted(tmp_path: Path) -> None:
    def notes(url: str) -> tuple[str, ...]:
        config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", ON, f"roles.teacher.server={url}"])
        found = examine(config)
        assert found.errors == ()
        return tuple(note for note in found.notes if note.startswith("the vocabulary"))

    with served({"/model_info": b'{"tokenizer_path": "Qwen/Qwen3-8B"}'}) as url:
        assert notes(url) == (
            (
                f"the vocabulary of roles.teacher.server {url} is not checked: 'Qwen/Qwen3-8B', its tokenizer, is no "
                "folder of this machine; the teacher needs the student's tokenizer"
            ),
        )
    with served({}) as url:
        (note,) = notes(url)
        start = f"the vocabulary of roles.teacher.server {url} is not checked: it does not say which model it serves ("
        assert note.startswith(f"{start}Client error '404 Not Found'")
    (note,) = notes("http://127.0.0.1:1")
    assert note.endswith("refused)")


def test_short_context_of_the_teacher_is_noted(errors: Errors, teacher: Path, tmp_path: Path) -> None:
    body = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(body | {"max_position_embeddings": 8}))
    config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", ON, f"roles.teacher.model={teacher}"])
    notes = examine(config).notes
    assert_says(" ".join(notes), "roles.teacher.model", "8 tokens", "up to 64", "quarantined")


def test_teachers_of_sources_need_a_mixture(errors: Errors, teacher: Path) -> None:
    several = f"roles.teacher.models={{ math = '{teacher}', code = '{teacher}' }}"
    assert any("[data] is none; set roles.teacher.model" in line for line in errors(ON, several))
    assert any("both model and models" in line for line in errors(ON, several, f"roles.teacher.model={teacher}"))


@pytest.mark.usefixtures("teacher")
def test_every_source_of_a_mixture_has_a_teacher(tmp_path: Path) -> None:
    text = TINY.read_text().replace('function = "tiny_tasks.make"\nsize = 500\n', "")
    source = '[data.mixture.{}]\nkind = "python"\nfunction = "tiny_tasks.make"\nsize = 9\n'
    text = text.replace(
        '[data]\nkind = "python"\n', '[data]\nkind = "mixture"\n' + source.format("a") + source.format("b")
    )
    path = tmp_path / "mixed.toml"
    shutil.copy(TINY.with_name("tiny_tasks.py"), tmp_path)

    def found(models: str) -> tuple[str, ...]:
        path.write_text(f"{text}\n[roles.teacher]\nmodels = {models}\n")
        config = load_config(path, [f"run.folder={tmp_path / 'run'}", ON])
        return examine(config).errors

    assert found("{ a = 'teacher', b = 'teacher' }") == ()
    (lacking,) = found("{ a = 'teacher' }")
    assert_says(lacking, "data.mixture.b", "b = <model folder>")
    (unknown,) = found("{ a = 'teacher', c = 'teacher' }")
    assert_says(unknown, "'c'", "[data.mixture]", "a, b")
    (absent,) = found("{ a = 'teacher', b = 'nowhere' }")
    assert "roles.teacher.models.b" in absent
    assert "does not exist" in absent
