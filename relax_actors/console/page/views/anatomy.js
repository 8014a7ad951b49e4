// Batch anatomy: a lane for each sample of a step, from the admission of its row to the step that trained it.
import { useAnswer } from "../lib/answer.js";
import { figure } from "../lib/format.js";
import { html } from "../lib/html.js";
import { choose, Pick } from "../lib/pick.js";
import { link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { StepChoice } from "../lib/step.js";
import { Table } from "../lib/table.js";

const COLOURS = { "wait and generate": "--c0", reward: "--c2", advantage: "--c3", "wait for the step": "--c7", dropped: "--c4", quarantined: "--c6" };

function colour(name) {
  return `var(${COLOURS[name] || "--c5"})`;
}

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${figure(Number(value.toFixed(2)))} s`;
}

/** Place of a time in the chart, in percent. */
export function place(time, from, to) {
  return to > from ? Math.min(100, Math.max(0, (100 * (time - from)) / (to - from))) : 0;
}

function Lane({ lane, from, to }) {
  const said = lane.spans.map((span) => `${span.name} ${seconds(span.end - span.begin)}${span.actor ? ` by ${span.actor}` : ""}`).join(", ");
  return html`<div class="lane" role="img" aria-label=${said} title=${said}>
    ${lane.spans.map((span, i) => html`<span key=${i} style=${{ left: `${place(span.begin, from, to)}%`, width: `${Math.max(0.2, place(span.end, from, to) - place(span.begin, from, to))}%`, background: colour(span.name) }}></span>`)}
    ${lane.turns.map((turn, i) => html`<i key=${i} title=${`turn ${turn.number}${turn.calls.length ? `, calls ${turn.calls.join(", ")}` : ""}`} style=${{ left: `${place(turn.time, from, to)}%` }}></i>`)}
  </div>`;
}

const length = (lane) => (lane.spans.length ? lane.spans.at(-1).end - lane.spans[0].begin : 0);
const byVersion = (lane) => lane.versions.map(([version, count]) => `${version}: ${figure(count)}`).join(", ");

export function columns(from, to) {
  return [
    { name: "row", label: "Sample", tight: true, show: (lane) => html`<a href=${link("sample", { row: lane.row, sample: lane.sample || "" })}>${lane.row}, ${lane.sample}</a>` },
    { name: "spans", label: "Time", value: length, show: (lane) => html`<${Lane} lane=${lane} from=${from} to=${to} />` },
    { name: "versions", label: "Tokens by version", value: byVersion, show: byVersion },
    { name: "tools", label: "Turns and tools", value: (lane) => lane.turns.length, show: (lane) => (lane.turns.length ? `${figure(lane.turns.length)} turns${lane.turns.some((t) => t.calls.length) ? `; ${[...new Set(lane.turns.flatMap((t) => t.calls))].join(", ")}` : ""}` : "") },
    { name: "reward", label: "Reward", number: true, show: (lane) => (lane.reward === null ? "" : figure(lane.reward)) },
    { name: "trained", label: "Trained tokens", number: true, show: (lane) => (lane.trained ? figure(lane.trained) : "none") },
    { name: "finish_reason", label: "Ended by" },
  ];
}

const KEYS = ["role", "every", "outlier"];

/** What a lane is picked by; an outlier is a sample whose row took long. */
function facts(lane) {
  const actors = [...lane.spans, ...lane.turns].map((each) => each.actor.split("#")[0]).filter(Boolean);
  return { actors, measure: length(lane), text: `${lane.row} ${lane.finish_reason} ${lane.turns.flatMap((turn) => turn.calls).join(" ")}` };
}

export default function AnatomyView({ run, parameters, pulse }) {
  const state = useAnswer("anatomy", { run, step: parameters.step }, pulse);
  const data = state.data;
  const lanes = data?.lanes || [];
  const times = lanes.flatMap((lane) => lane.spans.flatMap((span) => [span.begin, span.end]));
  const from = times.reduce((a, b) => Math.min(a, b), Infinity);
  const to = times.reduce((a, b) => Math.max(a, b), 0);
  const shown = choose(parameters.pick, lanes, facts, KEYS);
  const names = [...new Set(lanes.flatMap((lane) => lane.spans.map((span) => span.name)))];
  return html`<div class="stack">
    <h2>Batch anatomy</h2>
    <${State} ...${state} />
    ${data && html`<${StepChoice} step=${data.step} newest=${data.newest} parameters=${parameters} />`}
    ${data && !lanes.length && html`<p class="panel warn" role="status">${data.step === null ? "No step has a batch yet." : "Neither the table nor the record has rows of this step; record.every = 1 keeps all."}</p>`}
    ${lanes.length > 0 && html`
      <p>${figure(lanes.length)} samples over ${seconds(to - from)}, from the admission of the first row on.${data.missing ? ` ${figure(data.missing)} trained rows were not kept.` : ""} <a href=${link("rows", { step: data.step })}>Rows of the step</a></p>
      <div class="legend">${names.map((name) => html`<span key=${name}><i style=${{ background: colour(name) }}></i>${name}</span>`)}</div>
      <${Pick} parameters=${parameters} found=${shown} total=${lanes.length} keys=${KEYS} measure="time in the table" />
      <div class="panel"><${Table} title=${`Samples of step ${data.step}`} columns=${columns(from, to)} rows=${shown.items} id=${(lane) => `${lane.row} ${lane.sample}`} parameters=${parameters} cards /></div>`}
  </div>`;
}
