// A row with its samples: chat, tokens, turns and branches, media, parts of the reward, and who wrote what when.
import { useAnswer } from "../lib/answer.js";
import { EVENTS } from "../lib/events.js";
import { bytes, clock, figure } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Medium } from "../lib/medium.js";
import { change, link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { Strip } from "../lib/strip.js";
import { Table } from "../lib/table.js";

const PAGE = 5000;

/** The text of a message; a medium in it as its kind in brackets, a call of a tool with its arguments. */
export function said(message) {
  const parts = Array.isArray(message.content) ? message.content : [message.content];
  const texts = parts.filter(Boolean).map((part) => (typeof part === "string" ? part : part.type === "text" ? part.text : `[${part.type}]`));
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  return [...texts, ...calls.map((call) => `[call ${call.function?.name ?? ""} ${JSON.stringify(call.function?.arguments ?? {})}]`)].join("");
}

function Chat({ messages }) {
  return html`${messages.map((message, i) => html`<div key=${i} class=${`said ${message.role === "assistant" ? "assistant" : ""}`}>${message.role && html`<span class="dim">${String(message.role)}</span>`}<pre tabindex="0">${said(message)}</pre></div>`)}`;
}

const PARTS = [
  { name: "column", label: "Part" },
  { name: "author", label: "Written by", show: (part) => (part.author ? html`<a href=${link("actors")}>${part.author}</a>` : "unknown") },
  { name: "time", label: "Stored", tight: true, show: (part) => clock(part.time) },
  { name: "after", label: "After the part before", number: true, show: (part) => (part.after === null ? "" : `${figure(Number(part.after.toFixed(3)))} s`) },
  { name: "sequence", label: "Message", number: true },
  { name: "size", label: "Size", number: true, show: (part) => bytes(part.size) },
];

function Facts({ sample }) {
  const facts = [
    ["reward", sample.reward === null ? "not scored" : figure(sample.reward)],
    ...Object.entries(sample.components).map(([name, value]) => [`reward of ${name}`, figure(value)]),
    ["advantage", sample.advantage === null ? "none" : figure(sample.advantage)],
    ["tokens", `${figure(sample.tokens)}, ${figure(sample.trained)} in the loss`],
    ["ended by", sample.finish_reason],
    ...Object.entries(sample.metrics).map(([name, value]) => [name.replaceAll("_", " "), figure(value)]),
  ];
  return html`<dl class="tiles">${facts.map(([name, value]) => html`<div class="tile" key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <p>Sampled by ${Object.entries(sample.versions).map(([version, count]) => html`<span key=${version}><a href=${link("weights")}>version ${version}</a> (${figure(count)} tokens) </span>`)}${Object.keys(sample.versions).length ? "" : "no policy: the row comes from the data"}</p>`;
}

/** Turns as a tree: those that continue a turn stand below it. */
export function tree(turns, parent = -1) {
  return turns.filter((turn) => turn.parent === parent).map((turn) => ({ turn, children: turn.number > parent ? tree(turns, turn.number) : [] }));
}

function Branch({ nodes }) {
  return html`<ul class="tree">${nodes.map(({ turn, children }) => html`<li key=${`${turn.attempt} ${turn.number}`}>
    <details><summary>turn ${turn.number}${turn.player ? ` of ${turn.player}` : ""}: ${figure(turn.tokens)} tokens${turn.calls.map((call) => `, calls ${call.name}`).join("")}${turn.reward === null ? "" : `, reward before it ${figure(turn.reward)}`}</summary>
      <p class="dim">${turn.author}, ${clock(turn.time)}, version ${turn.versions.join(", ")}, ended by ${turn.finish_reason}</p>
      ${turn.messages.map(([role, text], i) => html`<div key=${i}><span class="dim">${role}</span><pre tabindex="0">${text}</pre></div>`)}</details>
    ${children.length > 0 && html`<${Branch} nodes=${children} />`}</li>`)}</ul>`;
}

function Turns({ turns }) {
  const attempts = [...new Set(turns.map((turn) => turn.attempt))];
  return html`<section class="panel"><h3>Turns and branches</h3>
    ${attempts.map((attempt) => html`<div key=${attempt}>${attempts.length > 1 && html`<h4>Attempt ${attempt}</h4>`}<${Branch} nodes=${tree(turns.filter((turn) => turn.attempt === attempt))} /></div>`)}</section>`;
}

function Pages({ first, lengths }) {
  const most = Math.max(0, ...lengths);
  if (most <= PAGE) return null;
  return html`<div class="row"><button disabled=${first === 0} onClick=${() => change({ first: Math.max(0, first - PAGE) || "" })}>Earlier tokens</button>
    <span>tokens ${figure(first)} to ${figure(Math.min(most, first + PAGE))} of ${figure(most)}</span>
    <button disabled=${first + PAGE >= most} onClick=${() => change({ first: first + PAGE })}>Later tokens</button></div>`;
}

function Sample({ data, sample, parameters }) {
  const turns = sample.turns;
  return html`<section class="stack" aria-label=${`sample ${data.sample}`}>
    <${Facts} sample=${sample} />
    <section class="panel"><h3>What was said</h3><${Chat} messages=${sample.messages.length ? sample.messages : [{ role: "assistant", content: sample.text }]} /></section>
    <${Pages} first=${data.first} lengths=${data.lengths} />
    ${sample.strips.map((strip, i) => html`<${Strip} key=${`${data.sample} ${i} ${data.first}`} strip=${strip} first=${data.first} number=${i} parameters=${parameters} />`)}
    ${turns.length > 0 && html`<${Turns} turns=${turns} />`}
  </section>`;
}

function Row({ run, data, parameters }) {
  const row = data.detail;
  const [kind, step] = row.row.split(".");
  const chosen = row.samples[data.sample];
  const fate = data.trained === null ? "its step has no batch yet" : data.trained ? `trained by step ${step}` : `not trained by step ${step}`;
  return html`<div class="stack">
    <p>${kind === "eval" ? `held-out row of version ${step}` : html`<a href=${link("rows", { step })}>step ${step}</a>, ${fate}`}${row.why.length ? `; kept by ${row.why.map((rule) => `record.${rule}`).join(", ")}` : "; from the table"}. ${kind === "group" && html`<a href=${link("anatomy", { step })}>Where its time went</a>`}</p>
    ${row.end.column && html`<section class="panel"><h3>${row.end.column}</h3><pre tabindex="0">${Object.entries(row.end).filter(([name]) => name !== "column").map(([name, value]) => `${name}: ${value}`).join("\n")}</pre></section>`}
    ${row.problem && html`<p class="panel warn">${row.problem}</p>`}
    <section class="panel"><h3>Prompt</h3><${Chat} messages=${row.messages.length ? row.messages : [{ role: "", content: row.prompt }]} />
      ${row.answer && html`<p>Expected answer: <code>${row.answer}</code></p>`}
      ${row.media.map((medium) => html`<${Medium} key=${medium.digest} run=${run} row=${row.row} medium=${medium} />`)}</section>
    ${row.samples.length > 0 && html`<div class="row" role="group" aria-label="samples">${row.samples.map((sample, i) => html`<button key=${i} aria-pressed=${i === data.sample} onClick=${() => change({ sample: i || "", first: "" })}>Sample ${i}${sample.reward === null ? "" : `: ${figure(sample.reward)}`}</button>`)}</div>`}
    ${chosen && html`<${Sample} data=${data} sample=${chosen} parameters=${parameters} />`}
    <div class="panel"><${Table} title="Parts of the row" columns=${PARTS} rows=${row.parts.map((part, i) => ({ ...part, after: i && part.time ? part.time - row.parts[i - 1].time : null }))} id=${(part) => part.column} cards /></div>
    ${data.events.length > 0 && html`<div class="panel"><${Table} title="Events that name the row" columns=${EVENTS} rows=${data.events} id=${(event) => event.sequence} cards /></div>`}
  </div>`;
}

export default function SampleView({ run, parameters }) {
  const { row, sample, first } = parameters;
  const state = useAnswer(row ? "row" : "", { run, row, sample, first });
  const rows = useAnswer(row ? "" : "rows", { run });
  if (!row) {
    const shown = (rows.data?.rows || []).filter((each) => each.shown);
    return html`<div class="stack"><h2>Sample</h2><${State} ...${rows} />
      <p>Choose a row in <a href=${link("rows")}>Rows</a>${shown.length ? `, or one of the newest step, ${figure(rows.data.step)}:` : "."}</p>
      ${shown.length > 0 && html`<ul>${shown.map((each) => html`<li key=${each.row}><a href=${link("sample", { row: each.row })}>${each.row}</a>${each.reward === null ? "" : `, mean reward ${figure(each.reward)}`}</li>`)}</ul>`}</div>`;
  }
  return html`<div class="stack"><h2>${row}</h2><${State} ...${state} />${state.data && html`<${Row} run=${run} data=${state.data} parameters=${parameters} />`}</div>`;
}
