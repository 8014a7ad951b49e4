"""Files of the page: vendored modules with their licences, nothing from elsewhere, and modules that compute."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from relax_actors.console.app import PAGE
from tests.support.programs import needs_programs

OWN = sorted(path for path in PAGE.rglob("*") if path.is_file() and "vendor" not in path.parts)
VENDORED = {
    # htm 3.1.1, preact/standalone.module.js: htm (Apache-2.0) with preact (MIT)
    "htm-preact.js": ("72284e8e9079c87817145df1110f74e8", ("htm-LICENSE", "preact-LICENSE")),
    # uPlot 1.6.32, dist/uPlot.esm.js and dist/uPlot.min.css (MIT)
    "uplot.js": ("5dd9b3281aa64b461b42d9945f6adb26", ("uplot-LICENSE",)),
    "uplot.css": ("df630c6a8d6f8eeaff264b50f73ce5b1", ("uplot-LICENSE",)),
}
"""First 32 digits of the SHA-256 of each vendored file as npm has it, and the files of its licences."""


def test_vendored_files_are_unchanged_and_have_their_licences() -> None:
    licences = {name for _, names in VENDORED.values() for name in names}
    assert {path.name for path in (PAGE / "vendor").iterdir()} == VENDORED.keys() | licences
    for name, (digest, _) in VENDORED.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest()[:32] == digest, name
    texts = {name: (PAGE / "vendor" / name).read_text() for name in licences}
    assert "Apache License" in texts["htm-LICENSE"]
    assert all("Permission is hereby granted" in texts[name] for name in ("preact-LICENSE", "uplot-LICENSE"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_page_loads_nothing_from_elsewhere_and_writes_no_markup(path: Path) -> None:
    text = path.read_text()
    addresses = [url for url in re.findall(r"(?:https?:)?//[\w.]+[\w/.]*", text) if "://" in url]
    assert {url for url in addresses if "w3.org" not in url} <= {"http://127.0.0.1"}
    for risk in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert risk not in text
    if path.suffix == ".html":  # the policy refuses inline handlers
        assert not re.search(r"\son\w+=", text)


@needs_programs("nodejs", "node")
def test_modules_compute(tmp_path: Path) -> None:
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "check.js").write_text("""
import assert from "node:assert/strict";
globalThis.location = { hash: "#/run?run=demo&with=a%26b" };
globalThis.document = { documentElement: {} };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
globalThis.devicePixelRatio = 1;
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
const { parse } = await import("./page/lib/log.js");
assert.deepEqual(parse('id: 7\\nevent: log\\ndata: {"a": 1}'), { kind: "log", id: 7, body: { a: 1 } });
assert.equal(parse(": waiting"), null);
const { csv } = await import("./page/lib/export.js");
const table = csv(["a", "b"], [["=1+1", 'x"y'], [-1, null], ["p,q", "l\\nm"]]);
assert.equal(table, 'a,b\\n\\'=1+1,"x""y"\\n-1,\\n"p,q","l\\nm"\\n');
const route = await import("./page/lib/route.js");
assert.deepEqual(route.parse(location.hash), { view: "run", parameters: { run: "demo", with: "a&b" } });
assert.equal(route.link("actors"), "#/actors?run=demo");
assert.equal(route.link("run", { smooth: "", from: 3 }), "#/run?run=demo&from=3");
// As in a browser: the address of a HashChangeEvent is empty unless it is given.
globalThis.HashChangeEvent = class extends Event {
  constructor(type, { oldURL = "", newURL = "" } = {}) { super(type); Object.assign(this, { oldURL, newURL }); }
};
globalThis.history = { replaceState: (_, __, to) => { location.hash = to; location.href = `http://127.0.0.1/${to}`; } };
history.replaceState(null, "", "#/run?run=demo&with=a%26b");
let seen = null;
globalThis.dispatchEvent = (event) => { seen = event; };
route.change({ sort: "-a", with: "" }, true);
assert.equal(new URL(seen.oldURL).hash, "#/run?run=demo&with=a%26b");
assert.equal(new URL(seen.newURL).hash, "#/run?run=demo&sort=-a");
const { shade } = await import("./page/lib/strip.js");
assert.deepEqual([-3, 0, null].map((value) => shade(value, [-3, 0], "logprob")), [0, 6, null]);
assert.deepEqual([0, 2, null].map((value) => shade(value, [0, 2], "entropy")), [6, 0, null]);
const format = await import("./page/lib/format.js");
assert.deepEqual([0.123456, 1234, null, 1e-7].map(format.figure), ["0.1235", "1,234", "none yet", "1.000e-7"]);
assert.deepEqual([10, 2048, 5 * 2 ** 30].map(format.bytes), ["10 B", "2.0 KiB", "5.0 GiB"]);
const chart = await import("./page/lib/chart.js");
const mean = chart.smooth([1, 1, 1, 3], 0.5);
assert.deepEqual(mean.slice(0, 3), [1, 1, 1]);
assert.ok(mean[3] > 1 && mean[3] < 3);
const curve = (steps) => ({ steps, mean: steps, low: steps, high: steps });
const [steps, a, , , b] = chart.columns([{ curve: curve([0, 2]) }, { curve: curve([1, 2]) }], 0);
assert.deepEqual([steps, a, b], [[0, 1, 2], [0, undefined, 2], [undefined, 1, 2]]);
const { choose } = await import("./page/lib/pick.js");
const role = (i) => (i < 20 ? "rollout" : "reward");
const pool = Array.from({ length: 30 }, (_, i) => ({ name: `${role(i)}.${i % 20}`, node: `node ${i % 3}`, size: i }));
const facts = (item) => ({ actors: [item.name], node: item.node, text: item.name, measure: item.size });
const names = (text) => choose(text, pool, facts).items.map((item) => item.name);
assert.equal(names("").length, 30);
assert.deepEqual(names("role:rollout.1"), ["rollout.1"]);
assert.equal(names("role:rollout").length, 20);
assert.deepEqual(names("role:rollout node:1 every:3"), ["rollout.1", "rollout.10", "rollout.19"]);
assert.deepEqual(names("outlier:2 reward"), ["reward.8", "reward.9"]);
assert.deepEqual(names("role:roll"), []);
for (const text of ["rank:1", "every:0", "every:1.5", "outlier:x"]) {
  const wrong = choose(text, pool, facts);
  assert.ok(wrong.problem.startsWith(text.split(":")[0]), wrong.problem);
  assert.equal(wrong.items.length, 30);
}
assert.match(choose("node:1", pool, facts, ["every"]).problem, /use every:/);
const { sorted, sortable } = await import("./page/lib/table.js");
const by = (sort, values) => sorted(values.map((a) => ({ a })), sort).map((row) => row.a);
assert.deepEqual(by("a", [3, null, 1, 20]), [1, 3, 20, null]);
assert.deepEqual(by("-a", [3, null, 1, 20]), [20, 3, 1, null]);
assert.deepEqual(by("a", ["r.10", "r.2", ""]), ["r.2", "r.10", ""]);
assert.deepEqual(by("", [3, 1]), [3, 1]);
const timeline = await import("./page/views/timeline.js");
const lane = (actor) => ({ actor, number: 0, spans: [] });
const wide = Array.from({ length: 5 }, () => lane("rollout.0"));
const order = timeline.prepare({ lanes: [lane("prompts.0"), ...wide, lane("trainer.0")] }).map((each) => each.actor);
assert.deepEqual(order, ["prompts.0", "trainer.0", ...wide.map((each) => each.actor)]);
const evaluation = await import("./page/views/evaluation.js");
assert.equal(evaluation.short("a\\n  b"), "a b");
assert.equal(evaluation.short("x".repeat(70)).length, 64);
const actors = await import("./page/views/actors.js");
const busy = { name: "c.0", rows: ["group.1.2"], waits_for: "" };
const plain = { ...busy, activity: "", since: 1, restarts: 0, restarts_of_run: 0, gpus: "", phase: "ready" };
const at = (name, figures) => ({ ...plain, name, figures });
const fleet = [at("a.0", { busy: 0.2, rss_mib: 30 }), at("b.0", {}), at("c.0", { busy: 0.9, rss_mib: 4 })];
const sortedBy = (sort) => sorted(fleet, sort, actors.COLUMNS).map((actor) => actor.name);
assert.deepEqual(sortedBy("-busy"), ["c.0", "a.0", "b.0"]);
assert.deepEqual(sortedBy("memory"), ["c.0", "a.0", "b.0"]);
const fixed = actors.COLUMNS.filter((column) => !sortable(column, fleet)).map((column) => column.name);
assert.deepEqual(fixed, ["incarnation", "pid"]);
const anatomy = await import("./page/views/anatomy.js");
const lived = (row, end) => ({ row, spans: [{ begin: 1, end: 2 }, { begin: 2, end }], versions: [], turns: [] });
const byTime = sorted([lived("r.0", 3), lived("r.1", 12)], "-spans", anatomy.columns(0, 1)).map((each) => each.row);
assert.deepEqual(byTime, ["r.1", "r.0"]);
assert.equal(sortable({ name: "rewards" }, [{ rewards: [1, 0] }]), false);
const idle = (name) => ({ name, rows: [], waits_for: "a row" });
assert.deepEqual(actors.waits([busy, idle("a.0"), idle("b.0")]), [["a row", ["a.0", "b.0"]]]);
""")
    done = subprocess.run(
        [shutil.which("node") or "node", "check.js"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
