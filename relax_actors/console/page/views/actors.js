// Nodes and actors: state, what each waits for, restarts, devices and figures of its process, its machine and GPUs.
import { useAnswer } from "../lib/answer.js";
import { bytes, duration, figure } from "../lib/format.js";
import { html } from "../lib/html.js";
import { choose, Pick } from "../lib/pick.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

const now = () => Date.now() / 1000;

function phase(actor) {
  const good = actor.phase === "ready";
  return html`<span class=${good ? "good" : actor.phase === "over" ? "dim" : "warn"}>${actor.phase.replaceAll("_", " ")}</span>`;
}

/** What `doing` shows, without the time. */
function work(actor) {
  return actor.rows.length || !actor.waits_for ? actor.activity : `waits for ${actor.waits_for}`;
}

function doing(actor) {
  if (actor.rows.length) return actor.activity;
  return actor.waits_for ? html`<span>waits for <b>${actor.waits_for}</b> for ${duration(actor.waiting_seconds)}</span>` : actor.activity;
}

const share = (value) => (value === undefined || value === null ? "" : `${Math.round(100 * value)} %`);

const mib = (value) => bytes(value * 2 ** 20);

/** A text with a bar that is as long as the share of `value` in `most`; without a bar if one of them is unknown. */
function Meter({ value, most, children }) {
  const part = value === null || !most ? null : Math.min(1, Math.max(0, value / most));
  return html`<span class="meter">${children}${part !== null && html`<span class=${`level${part > 0.9 ? " full" : ""}`} aria-hidden="true"><i style=${{ width: `${100 * part}%` }}></i></span>`}</span>`;
}

const used = (gpu) => (gpu.used_mib === null ? "" : `${mib(gpu.used_mib)}${gpu.memory_mib === null ? "" : ` of ${mib(gpu.memory_mib)}`}`);

/** Columns of the GPUs of a node; `holders` names the actors that hold each of them. */
export function gpuColumns(holders) {
  return [
    { name: "number", label: "GPU", number: true },
    { name: "name", label: "Name" },
    { name: "busy", label: "Busy", tight: true, show: (gpu) => html`<${Meter} value=${gpu.busy} most=${1}>${share(gpu.busy)}<//>` },
    { name: "used_mib", label: "Memory in use", tight: true, show: (gpu) => html`<${Meter} value=${gpu.used_mib} most=${gpu.memory_mib}>${used(gpu)}<//>` },
    { name: "celsius", label: "Temperature", number: true, show: (gpu) => (gpu.celsius === null ? "" : `${figure(gpu.celsius)} °C`) },
    { name: "watts", label: "Power", number: true, show: (gpu) => (gpu.watts === null ? "" : `${figure(gpu.watts)} W`) },
    { name: "held_by", label: "Held by", value: (gpu) => (holders[gpu.number] || []).join(", "), show: (gpu) => (holders[gpu.number] || []).join(", ") },
  ];
}

function Machine({ node }) {
  const { machine } = node;
  if (!machine) return null;
  const { load, cores, memory_mib: memory, memory_free_mib: free, disk_free_mib: disk } = machine;
  return html`<div class="row machine" role="group" aria-label=${`machine of ${node.name}`}>
      ${load !== null && html`<${Meter} value=${load} most=${cores}>load ${figure(load)} on ${figure(cores)} cores<//>`}
      ${free !== null && html`<${Meter} value=${memory - free} most=${memory}>${mib(free)} of ${mib(memory)} memory free<//>`}
      ${disk !== null && html`<span class="meter">${mib(disk)} of disk free</span>`}
    </div>`;
}

function Gpus({ node }) {
  const gpus = node.machine?.gpus || [];
  return gpus.length > 0 && html`<${Table} title=${`GPUs of ${node.name}`} columns=${gpuColumns(node.holders)} rows=${gpus} id=${(gpu) => gpu.number} cards />`;
}

const restarts = (actor) => Math.max(actor.restarts, actor.restarts_of_run);

export const COLUMNS = [
  { name: "name", label: "Actor", show: (actor) => html`<b>${actor.name}</b>` },
  { name: "phase", label: "State", tight: true, show: phase },
  { name: "activity", label: "What it does", value: work, show: doing },
  { name: "since", label: "For", tight: true, value: (actor) => (actor.since ? -actor.since : undefined), show: (actor) => (actor.since ? duration(now() - actor.since) : "") },
  { name: "restarts_of_run", label: "Restarts", number: true, value: restarts, show: (actor) => figure(restarts(actor)) },
  { name: "incarnation", label: "Incarnation", number: true, show: (actor) => actor.incarnation ?? "" },
  { name: "pid", label: "Process", number: true, show: (actor) => actor.pid ?? "" },
  { name: "gpus", label: "Devices" },
  { name: "busy", label: "Busy", number: true, value: (actor) => actor.figures.busy, show: (actor) => share(actor.figures.busy) },
  { name: "rate", label: "Rows/s", number: true, value: (actor) => actor.figures.rows_per_second, show: (actor) => (actor.figures.rows_per_second === undefined ? "" : figure(actor.figures.rows_per_second)) },
  { name: "memory", label: "Most memory", number: true, value: (actor) => actor.figures.rss_mib, show: (actor) => (actor.figures.rss_mib === undefined ? "" : `${figure(actor.figures.rss_mib)} MiB`) },
];

const OVER = ["name", "phase", "restarts_of_run", "memory"];

/** Count what actors wait for, so that the cause of a slow step stands in one line. */
export function waits(actors) {
  const counts = new Map();
  for (const actor of actors) {
    const what = actor.rows.length ? "" : actor.waits_for;
    if (what) counts.set(what, [...(counts.get(what) || []), actor.name]);
  }
  return [...counts].sort((a, b) => b[1].length - a[1].length);
}

/** What an actor is picked by; an outlier has waited for long. */
function facts({ actor, node }) {
  const measure = actor.waits_for ? actor.waiting_seconds : 0;
  return { actors: [actor.name], node, measure, text: `${actor.name} ${actor.phase} ${actor.activity} ${actor.waits_for}` };
}

export default function ActorsView({ run, parameters, pulse }) {
  const state = useAnswer("actors", { run }, pulse);
  const all = (state.data?.nodes || []).flatMap((node) => node.actors.map((actor) => ({ actor, node: node.name })));
  const shown = choose(parameters.pick, all, facts);
  const kept = new Set(shown.items.map((item) => item.actor));
  const nodes = (state.data?.nodes || []).map((node) => ({ ...node, actors: node.actors.filter((actor) => kept.has(actor)) }))
    .filter((node) => node.actors.length || !parameters.pick);
  const waiting = waits(nodes.flatMap((node) => node.actors));
  const broker = state.data?.broker || {};
  return html`<div class="stack">
    <h2>Actors</h2>
    <${State} ...${state} />
    ${state.data && !state.data.live && html`<p class="panel">The run is not up. These actors were ready in it.</p>`}
    ${broker.phase && html`<p class="panel">Broker: ${broker.phase} for ${duration(now() - broker.since)}, ${figure(broker.restarts || 0)} restarts</p>`}
    ${waiting.length > 0 && html`<section class="panel"><h3>Who waits for what</h3>
      <ul>${waiting.map(([what, names]) => html`<li key=${what}><b>${what}</b>: ${names.slice(0, 12).join(", ")}${names.length > 12 ? ` and ${names.length - 12} more` : ""}</li>`)}</ul></section>`}
    ${all.length > 0 && html`<${Pick} parameters=${parameters} found=${shown} total=${all.length} measure="time of waiting" />`}
    ${nodes.map((node) => html`<section class="panel stack" key=${node.name}>
      ${state.data.live && !node.has_lease && html`<p class="bad">This node has no lease: its supervisor is down, or cut off from the broker.</p>`}
      <${Table} title=${node.name} columns=${state.data.live ? COLUMNS : COLUMNS.filter((column) => OVER.includes(column.name))} rows=${node.actors} id=${(actor) => actor.name} parameters=${parameters} cards><${Machine} node=${node} /><//>
      <${Gpus} node=${node} />
    </section>`)}
    ${state.data && Object.entries(state.data.ignored).map(([name, why]) => html`<p class="bad" key=${name}>Entry lease.${name} is no lease and is ignored: ${why}</p>`)}
  </div>`;
}
