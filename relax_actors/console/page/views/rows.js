// The rows of a step: rewards, signal, staleness, what became of each; quarantined rows with their traceback.
import { useAnswer } from "../lib/answer.js";
import { post } from "../lib/api.js";
import { figure } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { choose, Pick } from "../lib/pick.js";
import { link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { StepChoice } from "../lib/step.js";
import { Table } from "../lib/table.js";

const SHOWN_REWARDS = 16;

function rewards(row) {
  const shown = row.rewards.slice(0, SHOWN_REWARDS).map(figure).join(", ");
  return row.rewards.length > SHOWN_REWARDS ? `${shown} and ${row.rewards.length - SHOWN_REWARDS} more` : shown;
}

const COLUMNS = [
  { name: "row", label: "Row", tight: true, show: (row) => (row.shown ? html`<a href=${link("sample", { row: row.row })}>${row.row}</a>` : row.row) },
  { name: "end", label: "End", show: (row) => `${row.end}${row.reason ? `: ${row.reason}` : ""}` },
  { name: "reward", label: "Mean reward", number: true, show: (row) => (row.reward === null ? "" : figure(row.reward)) },
  { name: "rewards", label: "Rewards of the samples", show: rewards },
  { name: "signal", label: "Signal", show: (row) => (row.signal === null ? "" : row.signal ? "yes" : html`<span class="warn">none: equal rewards</span>`) },
  { name: "staleness", label: "Staleness", number: true, show: (row) => (row.staleness === null ? "" : figure(row.staleness)) },
  { name: "tokens", label: "Tokens", number: true, show: (row) => (row.tokens === null ? "" : figure(row.tokens)) },
  { name: "kept", label: "Kept", show: (row) => (row.kept ? "yes" : row.shown ? "in the table" : "no") },
];

const KEYS = ["every", "outlier"];

/** What a row is picked by; an outlier has many tokens. */
function facts(row) {
  return { text: `${row.row} ${row.end} ${row.reason} ${row.error} ${row.signal === false ? "no signal" : ""}`, measure: row.tokens };
}

function Quarantined({ run, row, may }) {
  const [said, setSaid] = useState("");
  const requeue = () => {
    setSaid("Requeueing ...");
    post("requeue", { run }, { rows: [row.row] })
      .then((done) => setSaid(done.requeued ? "Requeued: its task is admitted again." : "It was requeued before."))
      .catch((error) => setSaid(error.message));
  };
  return html`<details class="panel"><summary><b>${row.row}</b> quarantined by ${row.reason}: ${row.error.split("\n")[0]}</summary>
    <pre tabindex="0">${row.trace || row.error}</pre>
    <div class="row">${may && html`<button disabled=${row.requeued} onClick=${requeue}>Requeue</button>`}
      <span role="status">${said || (row.requeued ? "It is requeued." : may ? "" : "An operator's link can requeue it.")}</span></div>
  </details>`;
}

export default function RowsView({ run, parameters, pulse, session }) {
  const state = useAnswer("rows", { run, step: parameters.step }, pulse);
  const data = state.data;
  const batch = data?.batch || {};
  const shown = choose(parameters.pick, data?.rows || [], facts, KEYS);
  const failed = (data?.rows || []).filter((row) => row.error);
  const flat = (data?.rows || []).filter((row) => row.signal === false).length;
  return html`<div class="stack">
    <h2>Rows</h2>
    <${State} ...${state} />
    ${data && html`<${StepChoice} step=${data.step} newest=${data.newest} parameters=${parameters} />`}
    ${data && data.problem && html`<p class="panel warn" role="status">${data.problem}</p>`}
    ${data && data.rows.length > 0 && html`
      <p>${figure(data.rows.length)} rows${batch.reward === undefined ? "" : `, mean reward ${figure(batch.reward)}, staleness ${figure(batch.staleness)}, ${figure(batch.tokens)} trained tokens`}${flat ? `, ${figure(flat)} without signal` : ""}. <a href=${link("anatomy", { step: data.step })}>Where their time went</a></p>
      <${Pick} parameters=${parameters} found=${shown} total=${data.rows.length} keys=${KEYS} measure="tokens" />
      <div class="panel"><${Table} title=${`Rows of step ${data.step}`} columns=${COLUMNS} rows=${shown.items} id=${(row) => row.row} parameters=${parameters} cards /></div>`}
    ${failed.map((row) => html`<${Quarantined} key=${row.row} run=${run} row=${row} may=${session.operations.includes("requeue")} />`)}
  </div>`;
}
