// Held-out results by version and set, the answers of a version, and a prompt's answers over all versions.
import { useAnswer } from "../lib/answer.js";
import { Chart } from "../lib/chart.js";
import { figure } from "../lib/format.js";
import { html } from "../lib/html.js";
import { choose, Pick } from "../lib/pick.js";
import { change, link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

function curveOf(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined);
  const values = known.map(([, value]) => value);
  return { steps: known.map(([version]) => version), mean: values, low: values, high: values };
}

function range(interval) {
  return interval ? ` (${figure(interval[0])} to ${figure(interval[1])})` : "";
}

function cell(value) {
  return value ? `${figure(value.value)}${range(value.interval)}` : "";
}

function Figures({ figures }) {
  const ks = [...new Set(Object.values(figures).flatMap((set) => Object.keys(set.pass_at)))];
  const columns = [
    { name: "set", label: "Set" }, { name: "rows", label: "Rows", number: true }, { name: "failed", label: "Failed", number: true },
    { name: "reward", label: "Mean reward", show: (row) => cell(row.reward) },
    { name: "accuracy", label: "Accuracy", show: (row) => cell(row.accuracy) },
    ...ks.map((k) => ({ name: `pass@${k}`, label: `pass@${k}`, show: (row) => cell(row.pass_at[k]) })),
    ...ks.map((k) => ({ name: `majority@${k}`, label: `majority@${k}`, show: (row) => cell(row.majority_at[k]) })),
  ];
  const rows = Object.entries(figures).flatMap(([set, of]) => [
    { set, ...of }, ...Object.entries(of.categories).map(([name, part]) => ({ set: `${set}: ${name}`, ...part })),
  ]);
  return html`<div class="panel"><${Table} title="Figures by set, with intervals of 95 %" columns=${columns} rows=${rows} id=${(row) => row.set} cards /></div>`;
}

function Text({ row }) {
  const messages = row.messages.length ? row.messages : [["prompt", row.prompt]];
  return html`${messages.map(([role, text], i) => html`<div key=${i}><span class="dim">${role}</span><pre tabindex="0">${text}</pre></div>`)}`;
}

/** Beginning of a text, in one line. */
export function short(text, most = 60) {
  const line = String(text ?? "").replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most)} ...` : line;
}

const mean = (row) => (row.answers.length ? row.answers.reduce((sum, answer) => sum + answer.reward, 0) / row.answers.length : null);
const prompt = (row) => (row.messages.length ? row.messages.at(-1)[1] : row.prompt);

/** A prompt with its answers: a line that opens to the whole texts. */
function Said({ row }) {
  if (row.problem) return html`<span class="warn">${row.problem}</span>`;
  return html`<details><summary><code>${short(prompt(row))} → ${short(row.answers[0]?.text)}</code>${row.answers.length > 1 && html` <span class="dim">and ${figure(row.answers.length - 1)} more</span>`}</summary>
    <${Text} row=${row} />
    ${row.answers.map((answer, i) => html`<div key=${i}><b>${figure(answer.reward)}</b> <span class="dim">${answer.finish_reason}${answer.tokens === null ? "" : `, ${answer.tokens} tokens`}</span><pre tabindex="0">${answer.text}</pre></div>`)}
  </details>`;
}

/** Columns of answers: of one version to many prompts, or of all versions to one prompt. */
function answerColumns(all) {
  return [
    all ? { name: "version", label: "Version", number: true, show: (row) => html`<a href=${link("evaluation", { version: row.version })}>${row.version}</a>` }
      : { name: "index", label: "Prompt", number: true, show: (row) => html`<a href=${link("evaluation", { index: row.index })} title="answers of all versions to this prompt">${row.index}</a>` },
    { name: "set", label: "Set", value: (row) => `${row.set}${row.category ? `, ${row.category}` : ""}`, show: (row) => `${row.set}${row.category ? `, ${row.category}` : ""}` },
    { name: "reward", label: "Reward", number: true, value: mean, show: (row) => row.answers.map((answer) => figure(answer.reward)).join(", ") },
    { name: "answer", label: "Expected", show: (row) => row.answer && html`<code>${short(row.answer, 40)}</code>` },
    { name: "said", label: "Prompt and answers", value: (row) => [prompt(row), ...row.answers.map((answer) => answer.text)].join(" → "), show: (row) => html`<${Said} row=${row} />` },
  ];
}

const KEYS = ["every", "outlier"];

/** What a prompt is picked by; an outlier has a high reward. */
function facts(row) {
  return { measure: mean(row), text: [row.set, row.category, prompt(row), row.answer, row.problem, ...row.answers.map((answer) => answer.text)].join(" ") };
}

function Answers({ run, parameters }) {
  const state = useAnswer("answers", { run, version: parameters.version, index: parameters.index, first: parameters.first });
  const data = state.data;
  const first = Number(parameters.first || 0);
  const all = parameters.index !== undefined;
  const title = all ? `Answers to prompt ${parameters.index}` : `Answers of version ${parameters.version}`;
  const shown = choose(parameters.pick, data?.rows || [], facts, KEYS);
  return html`<section class="stack">
    <div class="row spread"><h2>${title}</h2>
      <a href=${link("evaluation")}>All versions</a></div>
    <${State} ...${state} />
    ${data && !all && html`<${Figures} figures=${data.figures} />
      <div class="row"><button disabled=${first === 0} onClick=${() => change({ first: Math.max(0, first - 100) || "" })}>Earlier rows</button>
      <span>${figure(first + 1)} to ${figure(first + data.rows.length)} of ${figure(data.total)}</span>
      <button disabled=${first + data.rows.length >= data.total} onClick=${() => change({ first: first + 100 })}>Later rows</button></div>`}
    ${data && data.rows.length > 0 && html`<${Pick} parameters=${parameters} found=${shown} total=${data.rows.length} keys=${KEYS} measure="reward" />
      <div class="panel"><${Table} title=${title} columns=${answerColumns(all)} rows=${shown.items} id=${(row) => `${row.version} ${row.row}`} parameters=${parameters} cards /></div>`}
  </section>`;
}

function Results({ run, pulse, theme }) {
  const state = useAnswer("evaluations", { run }, pulse);
  const results = state.data?.results || [];
  const sets = [...new Set(results.flatMap((result) => Object.keys(result.sets)))];
  const lines = sets.map((name) => ({ name, curve: curveOf(results.map((result) => [result.version, result.sets[name]?.reward])) }));
  const accuracy = sets.map((name) => ({ name, curve: curveOf(results.map((result) => [result.version, result.sets[name]?.accuracy])) }))
    .filter((line) => line.curve.steps.length);
  const open = (version) => results.some((result) => result.kept && result.version === version) && change({ version });
  const columns = [
    { name: "version", label: "Version", number: true, show: (row) => (row.kept ? html`<a href=${link("evaluation", { version: row.version })}>${row.version}</a>` : row.version) },
    { name: "reward", label: "Mean reward", number: true, show: (row) => figure(row.reward) },
    { name: "rows", label: "Rows", number: true },
    ...sets.map((name) => ({ name, label: name, number: true, show: (row) => figure(row.sets[name]?.reward) })),
  ];
  return html`<section class="stack">
    <h2>Evaluation</h2>
    <${State} ...${state} />
    ${state.data && !results.length && html`<p>Nothing was evaluated yet. A run with [eval] evaluates version 0 before its first step.</p>`}
    ${results.length > 0 && html`<div class="grid">
      <${Chart} title="mean reward by version" lines=${lines} theme=${theme} unit="version" onPick=${open} />
      ${accuracy.length > 0 && html`<${Chart} title="accuracy by version" lines=${accuracy} theme=${theme} unit="version" onPick=${open} />`}
    </div>
    <div class="panel"><${Table} title="Results" columns=${columns} rows=${[...results].reverse()} id=${(row) => row.version} cards /></div>`}
  </section>`;
}

export default function EvaluationView({ run, parameters, pulse, theme }) {
  const one = parameters.version !== undefined || parameters.index !== undefined;
  return one ? html`<${Answers} run=${run} parameters=${parameters} />` : html`<${Results} run=${run} pulse=${pulse} theme=${theme} />`;
}
