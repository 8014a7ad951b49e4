"""`relax check` reports what `relax up` cannot run, with one clear line for each cause."""

from __future__ import annotations

import json
import os
import re
import socket
import string
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from broker.server import Server, ServerSettings
from relax_actors.checks import Findings, examine
from relax_actors.config import load_config
from relax_actors.devices.inventory import DRIVER_FILES, Inventory, simulate
from relax_actors.runtime.run_folder import RunFolder
from tests.support.media_rows import write_config
from tests.support.messages import assert_says
from tests.support.running import relax_here
from tests.support.tiny_images import png, write_video

pytestmark = pytest.mark.usefixtures("own_import_path", "own_working_folder")
DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
ARCHITECTURE = "model.architecture"


def errors(*overrides: str, config: Path = DEMO) -> tuple[str, ...]:
    return examine(load_config(config, list(overrides))).errors


def notes(*overrides: str) -> tuple[str, ...]:
    findings = examine(load_config(DEMO, list(overrides)))
    assert findings.errors == ()
    return findings.notes


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return relax_here("check", str(DEMO), *arguments, cwd=Path.cwd())


def test_data_is_checked_where_the_model_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    remedy = "give the path of a file or a folder, absolute or from the working directory"
    data = f"data.path = '{missing}' does not exist; {remedy}"
    model = f"{ARCHITECTURE}: hidden_size = 0 must be a whole number above 0"
    assert errors(f"{ARCHITECTURE}.hidden_size=0", "data.kind=jsonl", f"data.path={missing}") == (model, data)


def test_each_data_source_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted_tasks.py").write_text(
        "from pathlib import Path\n"
        "def make(*, size, seed, log):\n"
        "    with Path(log).open('a') as file:\n"
        "        file.write(f'{seed}\\n')\n"
        "    return [(f'{number}{seed}>', '1#') for number in range(10)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "opened"
    sections = [
        f"{section}.{setting}"
        for section in ("data", "eval.data")
        for setting in ("function=counted_tasks.make", f"options={{log={str(log)!r}}}")
    ]
    config = load_config(DEMO, [*sections, "data.seed=1", "eval.data.seed=2", "eval.rows=5"])
    assert examine(config, calls=tmp_path).errors == ()
    assert sorted(log.read_text().split()) == ["1", "2"]


def test_the_demo_has_no_errors() -> None:
    assert errors() == ()


def cuda_reason() -> str:
    installed = version("torch")
    if installed.endswith("+cpu"):
        return f'needs CUDA, but torch {installed} is built for CPUs; set "cpu" or "auto", or install torch with CUDA'
    return 'needs CUDA, but this machine has no GPU; set "cpu" or "auto"'


@pytest.mark.skipif(any(Path(path).exists() for path in DRIVER_FILES), reason=f"this machine has one of {DRIVER_FILES}")
@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ("trainer.device", []),
        ("rollout.device", []),
        ("roles.reference.device", ["algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1"]),
        ("roles.actor_fwd.device", ["algorithm.proximal=actor_fwd"]),
    ],
)
def test_cuda_without_a_gpu_is_refused_at_every_device_setting(setting: str, others: list[str]) -> None:
    for device in ("cuda", "cuda:1"):
        assert errors(f"{setting}={device}", *others) == (f"{setting} = {device!r} {cuda_reason()}",)


def test_the_device_of_a_role_on_another_machine_is_not_checked() -> None:
    config = load_config(DEMO, ["rollout.device=gpu"])
    assert examine(config, ["prompts", "trainer"]).errors == ()
    assert check("rollout.device=gpu", "--roles", "prompts,trainer").returncode == 0


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    remedy = 'write "auto", "cpu", "cuda" or "cuda:<number>"'
    assert errors("rollout.device=gpu") == (f"rollout.device = 'gpu' is no torch device; {remedy}",)


def test_actors_are_placed_on_the_gpus_of_a_machine() -> None:
    def found(gpus: str, *settings: str) -> Findings:
        return examine(load_config(DEMO, list(settings)), inventory=simulate(gpus))

    assert "2 GPUs (simulated GPU, 80 GiB) (--simulate-gpus): trainer.0 GPU 0, rollout.0 GPU 1" in found("2").notes
    (alone,) = [note for note in found("1").notes if note.startswith("on the CPU, as no GPU is free: rollout.0")]
    assert "placement.colocate" in alone
    shared = found("1", 'placement.colocate=[["rollout","trainer"]]').notes
    assert "1 GPU (simulated GPU, 80 GiB) (--simulate-gpus): trainer.0 GPU 0, rollout.0 GPU 0" in shared
    (problem,) = found("1", "trainer.device=cuda", "rollout.device=cuda").errors
    assert problem.startswith("rollout.0 needs 1 GPU; this node has 1 GPU (GPU 0): trainer.0 has GPU 0.")
    own = ("roles.own.actor=relax_actors.roles.scorer.Squares", "roles.own.gpus=2")
    (problem,) = found("3", *own).errors
    assert_says(problem, "own.0", "2 GPUs", "3 GPUs")
    (problem,) = examine(load_config(DEMO, list(own)), inventory=Inventory()).errors
    assert_says(problem, "own.0", "2 GPUs", "0 GPUs")
    (problem,) = found("8", "trainer.device=cuda:9").errors
    assert_says(problem, "trainer.0", "number 9", "8 GPUs (GPUs 0 to 7)")


def test_a_port_in_use_is_refused_unless_the_runs_own_broker_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = f"port {port} is in use; set broker.port to another, or to 0 for a free one"
        assert errors(f"broker.port={port}") == (message,)
        assert errors(f"broker.port={port}", "broker.url=nats://127.0.0.1:4222") == ()
    config = load_config(DEMO, [f"broker.port={port}", f"run.folder={tmp_path / 'run'}"])
    server = Server(RunFolder(config.folder).broker, ServerSettings(port=port))
    server.start()
    try:
        assert examine(config).errors == ()
        assert errors(f"broker.port={port}") == (message,)
    finally:
        server.stop()


@pytest.mark.parametrize("setting", ["run.folder", "store.path"])
def test_a_folder_that_cannot_be_written_is_refused(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    user, remedy = os.getuid(), f"choose another {setting}"
    for folder in (file, file / "below"):
        expected = f"{setting} {folder} cannot be written by user {user}: {file} is a file; {remedy}"
        assert errors(f"{setting}={folder}") == (expected,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["broker.url=nats://127.0.0.1:4222", "broker.credentials=/nowhere"],
            "broker.credentials /nowhere does not exist; create credentials with `relax keys`, or correct the path",
        ),
        (
            ["rollout.max_tokens=64"],
            (
                "rollout.max_tokens = 64 leaves no room for a prompt in the model's context "
                "(max_position_embeddings) = 64; lower it"
            ),
        ),
        (
            ["trainer.max_tokens_per_microbatch=6"],
            "rollout.max_tokens = 6 leaves no room for a prompt in trainer.max_tokens_per_microbatch = 6; lower it",
        ),
    ],
)
def test_settings_that_cannot_work_give_one_error(overrides: list[str], message: str) -> None:
    assert errors(*overrides) == (message,)


@pytest.mark.parametrize(
    ("override", "left", "most", "whole"),
    [("rollout.max_tokens=62", 2, 62, 64), ("trainer.max_tokens_per_microbatch=8", 2, 6, 8)],
)
def test_prompts_that_are_all_too_long_are_refused_with_the_first_row(
    override: str, left: int, most: int, whole: int
) -> None:
    limits = "the model's context, or trainer.max_tokens_per_microbatch if that is smaller"
    assert errors(override) == tuple(
        f"{where}: none of the first 200 rows can be used; the first: sort_digits.make item 1: prompt {prompt!r} has 5 "
        f"tokens, more than the {left} that rollout.max_tokens = {most} leaves of {whole} ({limits}); shorten the "
        "prompt, lower rollout.max_tokens, or set data.oversize"
        for where, prompt in (("data", "1872>"), ("eval.data", "8653>"))
    )


@pytest.mark.parametrize(
    ("oversize", "said"),
    [
        ("skip", "1 of the first 2 rows will be quarantined; the first: .*line 2: prompt '12345>' has 6 tokens"),
        ("keep", "2 rows, prompts of up to 6 tokens among the first 2$"),
        ("truncate_left", "2 rows, prompts of up to 5 tokens among the first 2; 1 of them are cut off$"),
    ],
)
def test_a_prompt_too_long_for_a_microbatch_is_treated_as_data_oversize_says(
    oversize: str, said: str, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "123>", "answer": "123"}\n{"prompt": "12345>", "answer": "12345"}\n')
    settings = (
        "data.kind=jsonl",
        f"data.path={tasks}",
        f"data.oversize={oversize}",
        "trainer.max_tokens_per_microbatch=11",
    )
    assert errors(*settings) == ()
    assert any(re.match(f"data: {said}", note) for note in notes(*settings))


def test_a_letter_outside_of_the_alphabet_is_named_with_its_row(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"prompt": "12>", "answer": "1x"}, {"prompt": "1a2>", "answer": "12"}, {"prompt": "12>", "answer": "12"}]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    remedy = "is not in the model's alphabet; add it to model.tokenizer.alphabet, or correct the row"
    found = notes("data.kind=jsonl", f"data.path={tasks}")
    assert_says(
        " ".join(found),
        "data: 1 of the first 3 rows",
        "quarantined",
        f"{tasks} line 2",
        "'a' at position 2",
        remedy,
    )
    assert_says(
        " ".join(found),
        "trainer.warm_start",
        "1 of the first 3 rows",
        f"{tasks} line 1",
        "'x' at position 2",
        remedy,
    )


@pytest.mark.parametrize(
    ("config", "alphabet", "said"),
    [
        (
            "calculator",
            None,
            r"cannot encode 79 of 96 usual characters \('abcdefghijkl\.\.\.'\): .* 79 are replaced by '\?'",
        ),
        ("own_agent", None, r"57 are left out\. Add them to model\.tokenizer\.alphabet"),
        ("own_agent", "0123456789:.abcdefux\\\n", "are escaped, as in "),
        ("own_agent", string.digits + string.ascii_letters + string.punctuation + " \n", None),
    ],
    ids=["replaced", "left out", "escaped", "nothing"],
)
def test_usual_characters_that_the_tokenizer_lacks_are_noted_where_the_model_reads_what_others_write(
    config: str, alphabet: str | None, said: str | None
) -> None:
    path = DEMO.parents[1] / "agents" / f"{config}.toml"
    overrides = [] if alphabet is None else [f"model.tokenizer.alphabet={json.dumps(alphabet)}"]
    findings = examine(load_config(path, overrides))
    found = [note for note in findings.notes if "cannot encode" in note]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0]), found


def test_letters_of_timestamps_are_needed_only_where_a_row_has_a_video(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4")
    (tmp_path / "b.png").write_bytes(png(1))
    rows = [{"prompt": "<image>7>", "images": ["b.png"]}, {"prompt": "<video>7>", "videos": ["a.mp4"]}]

    def found(count: int, alphabet: str) -> tuple[str, ...]:
        config = write_config(tmp_path, rows[:count])
        return errors(f"model.tokenizer.alphabet={alphabet}", "model.tokenizer.end=#", config=config)

    assert found(1, "0123456789>#") == ()
    assert found(2, "0123456789>#.< second") == ()
    (error,) = found(2, "0123456789>#.secn")
    assert_says(error, f"{tmp_path}/rows.jsonl line 2", "'<0.1 seconds>'", "'< od'", "model.tokenizer.alphabet")


def test_more_evaluated_rows_than_there_are_is_noted() -> None:
    assert_says(" ".join(notes("eval.rows=300")), "eval.rows = 300", "256 rows")
    assert not any("eval.rows" in note for note in notes("eval.rows=256"))


def test_the_check_prints_what_it_found_and_not_the_defaults() -> None:
    lines = check().stderr.splitlines()
    assert len(lines) < 20
    for words in ("model: qwen3, 0.14 M parameters", "rollout 1", "memory: about", "data: 60000 rows"):
        assert any(words in line for line in lines), words
    assert any(line.startswith("algorithm: no preset") and "defaults" in line for line in lines)


def test_findings_come_without_the_resolved_configuration_unless_asked_for() -> None:
    done = check("eval.rows=300")
    assert (done.returncode, done.stdout) == (0, "")
    *found, verdict = done.stderr.splitlines()
    assert found
    assert all(line.startswith(("note: ", "algorithm: ", "  ")) for line in found)
    assert verdict == "ok: this configuration can be run"
    resolved = check("--resolved", "rollout.device=gpu")
    assert resolved.returncode == 2
    assert json.loads(resolved.stdout)["rollout"]["device"] == "gpu"
    assert resolved.stderr.splitlines()[0].startswith("error: rollout.device = 'gpu' is no torch device")
    assert_says(resolved.stderr.splitlines()[-1], "1 error", "fix it before `relax up`")


@pytest.mark.parametrize("sandbox", ["bubblewrap", "container", "none"])
def test_a_sandboxed_environment_whose_tool_needs_a_sandbox_of_its_own_is_refused(sandbox: str) -> None:
    settings = ("environment.name=python", "environment.isolation=sandbox", f"environment.options.sandbox={sandbox}")
    found = [error for error in errors(*settings) if "run_python" in error]
    assert len(found) == (sandbox != "none")
    for error in found:
        assert_says(error, f'environment.options.sandbox = "{sandbox}"', 'environment.isolation = "sandbox"')
        assert 'environment.options.sandbox = "none"' in error
