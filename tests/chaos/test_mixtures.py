"""Runs on a mixture of files, killed: the same bits, every row once an epoch, and more epochs after the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from broker.subjects import RowId
from relax_actors.config import Config, load_config
from relax_actors.data.prompt_maker import open_data
from relax_actors.messages import Quarantined
from relax_actors.monitoring.connection import connected
from relax_actors.runtime.row_order import RowOrder
from tests.support.faults import story_of
from tests.support.kills import kill_actors
from tests.support.running import SUPPORT, Run, processes_of, wait_until

PLAIN = '[data]\nkind = "python"\nfunction = "tiny_tasks.make"\nsize = 30\n'
MIXED = """
[data]
kind = "mixture"

[data.mixture.words]
kind = "jsonl"
path = "words"
weight = 0.6
fields = { prompt = "question.text", answer = "solution" }

[data.mixture.sums]
kind = "parquet"
path = "sums-*.parquet"
weight = 0.4
"""
FAST = ("supervision.intensity=100000", "supervision.backoff_max=0.2", "supervision.ack_wait=1")
WORDS, SUMS, EPOCHS = 24, 16, 2
ROWS = EPOCHS * (WORDS + SUMS)
KILLS = (("batch.0", "prompts.0"), ("batch.3", "trainer.0"), ("batch.6", "examples.0"))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A configuration with data in files: 24 rows of JSON Lines in two of them, 16 of Parquet in four row groups."""
    folder = tmp_path / "words"
    folder.mkdir()
    for part in range(2):
        rows = [
            {"question": {"text": f"{i}>"}, "solution": str(i), "number": i} for i in range(12 * part, 12 * part + 12)
        ]
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for part in range(2):
        rows = [{"prompt": f"{i}>", "answer": str(9 * i)} for i in range(8 * part, 8 * part + 8)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"sums-{part}.parquet", row_group_size=4)
    path = tmp_path / "mixed.toml"
    path.write_text((SUPPORT / "tiny_examples.toml").read_text().replace(PLAIN, MIXED))
    return path


def trained_rows(run: Run, config: Config) -> Counter[int]:
    """How often each row of the data was trained, from the rows that batches name."""
    order = RowOrder(config, open_data(config.data))
    rows = [RowId(step, index) for step, batch in story_of(run).values("batch").items() for index in batch.rows]
    return Counter(order.item(row) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_ends_with_the_bits_of_one_that_got_more_epochs_after_its_end(
    make_run: Callable[..., Run], mixed: Path
) -> None:
    settings = ("trainer.schedule=constant", "trainer.warmup_steps=0", f"run.epochs={EPOCHS}")
    fewer = make_run("calm", *settings, "run.epochs=1", config=mixed).complete()
    assert (fewer["steps"], fewer["trained"]) == (5, WORDS + SUMS)
    calm = make_run("calm", *settings, config=mixed).complete()
    assert (calm["steps"], calm["trained"], calm["admitted"]) == (ROWS // 8, ROWS, ROWS)
    run = make_run("killed", *settings, *FAST, config=mixed).start()
    kill_actors(run, KILLS)
    run.disconnect()
    assert run.process is not None
    run.process.kill()  # and then the same command
    run.process.communicate()
    wait_until(lambda: not processes_of(run.folder.root), "end of all processes")
    code, result, said = run.start().finish()
    assert code == 0, said
    assert (result["steps"], result["trained"], result["admitted"]) == (ROWS // 8, ROWS, ROWS)
    assert result["weights_fingerprint"] == calm["weights_fingerprint"]
    config = load_config(mixed, list(settings))
    assert trained_rows(run, config) == dict.fromkeys(range(WORDS + SUMS), EPOCHS)


@pytest.mark.slow
def test_broken_rows_are_quarantined_and_counted(make_run: Callable[..., Run], mixed: Path) -> None:
    (mixed.parent / "words" / "0.jsonl").write_text('{"question": {"text": "1>"}, "solution": "1"}\n{broken\n{}\n')
    run = make_run("broken", "run.steps=5", config=mixed)
    result = run.complete()
    assert result["trained"] == 40
    assert result["quarantined"] >= 2
    with connected(str(run.folder.root)) as at:
        cells = at.table.snapshot([at.table.subjects.column("quarantined")])
        errors = {at.table.read(cell.data, Quarantined).error.partition(":")[0] for _, cell in cells}
    assert errors == {f"{mixed.parent}/words/0.jsonl line {line}" for line in (2, 3)}
