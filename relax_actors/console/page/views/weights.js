// Versions of the weights: size, delta, checkpoint, evaluation, and the actors that serve them.
import { useAnswer } from "../lib/answer.js";
import { bytes, clock, figure } from "../lib/format.js";
import { html } from "../lib/html.js";
import { link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

const COLUMNS = [
  { name: "version", label: "Version", number: true },
  { name: "time", label: "Published", tight: true, show: (row) => clock(row.time) },
  { name: "size", label: "Size", number: true, show: (row) => (row.size ? bytes(row.size) : "no files") },
  { name: "files", label: "Files", number: true },
  { name: "base", label: "Kind", show: (row) => (row.base === null ? "full set" : `delta to ${row.base}`) },
  { name: "checkpoint", label: "Checkpoint", show: (row) => (row.checkpoint ? "yes" : "") },
  { name: "evaluated", label: "Held-out reward", number: true, show: (row) => (row.evaluated === null ? "" : html`<a href=${link("evaluation", { version: row.version })}>${figure(row.evaluated)}</a>`) },
  { name: "served_by", label: "Served by", show: (row) => row.served_by.join(", ") },
  { name: "fingerprint", label: "Fingerprint", show: (row) => html`<code>${row.fingerprint}</code>` },
];

export default function WeightsView({ run, pulse }) {
  const state = useAnswer("weights", { run }, pulse);
  return html`<div class="stack">
    <h2>Weights</h2>
    <${State} ...${state} />
    ${state.data && html`<p>${figure(state.data.count)} versions; the newest, and those with a checkpoint:</p>
      <div class="panel"><${Table} title="Versions" columns=${COLUMNS} rows=${state.data.versions} id=${(row) => row.version} cards /></div>`}
  </div>`;
}
