// Where the run stands: progress, ledger, curves of one or several runs, events.
import { isSilent, useAnswer } from "../lib/answer.js";
import { get } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { EVENTS } from "../lib/events.js";
import { duration, figure } from "../lib/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../lib/html.js";
import { change, link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

const FIRST = ["step/reward", "eval/reward", "step/loss", "step/grad_norm", "step/k3", "step/staleness"];
const ABOUT = {
  "step/reward": "mean reward of the samples of a step",
  "eval/reward": "mean reward on held-out prompts",
  "step/loss": "loss of the policy, which need not fall while the reward grows",
  "step/grad_norm": "norm of the gradients before they are clipped",
  "step/k3": "KL divergence (k3) of the trained policy from the sampling policy",
  "step/staleness": "age of the oldest sample of a step, in versions of the weights",
};
const ENDS = ["trained", "in_flight", "dropped", "quarantined"];

function words(name) {
  return name.replaceAll("_", " ");
}

/** Reasons of dropped rows, the most frequent first; older ones are known by their number only. */
function reasons(dropped, below) {
  const known = Object.entries(dropped).sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${words(reason)} ${figure(count)}`);
  return [...known, ...(below ? [`in steps that a checkpoint has removed ${figure(below)}`] : [])].join(", ");
}

export function Ledger({ account, addsUp, checkedFrom, dropped, below }) {
  const total = Math.max(1, account.admitted);
  const sum = `admitted ${figure(account.admitted)} = ${ENDS.map((name) => `${words(name)} ${figure(account[name])}`).join(" + ")}`;
  return html`<section class="panel" aria-label="ledger">
    <h2>Rows</h2>
    <div class="bar" role="img" aria-label=${sum}>${ENDS.map((name) => html`<span key=${name} class=${name} style=${{ width: `${(100 * account[name]) / total}%` }}></span>`)}</div>
    <p id="ledger-sum">admitted <b>${figure(account.admitted)}</b> = ${ENDS.map((name, i) => html`<span key=${name}>${i ? " + " : ""}<i class=${`key ${name}`}></i>${words(name)} <b>${figure(account[name])}</b></span>`)}</p>
    ${account.dropped > 0 && html`<p class="dim">Dropped: ${reasons(dropped, below)}</p>`}
    ${checkedFrom > 0 && html`<p class="dim">Batches of the steps below ${figure(checkedFrom)} have not been checked yet.</p>`}
    ${!addsUp && html`<p role="alert" class="bad">The ledger does not add up: ${account.violations.join("; ")}</p>`}
  </section>`;
}

function Tile({ name, children }) {
  return html`<div class="tile"><div class="name">${name}</div><div class="value">${children}</div></div>`;
}

function state(data) {
  if (data.finished) return html`<span class="good">finished</span>`;
  return data.live ? html`<span class="good">up</span>` : html`<span class="warn">not up</span>`;
}

function Tiles({ data }) {
  return html`<div class="tiles">
    <${Tile} name="state">${state(data)}<//>
    <${Tile} name="step">${figure(data.step)} <small class="dim">of ${figure(data.steps)}</small><//>
    <${Tile} name="mean reward">${figure(data.figures["step/reward"])}<//>
    <${Tile} name="held-out reward">${figure(data.evaluations.at(-1)?.[1])}<//>
    <${Tile} name="steps a second">${data.steps_per_second === null ? "unknown" : figure(data.steps_per_second)}<//>
    ${data.live && !data.finished ? html`<${Tile} name="time left">${duration(data.seconds_left)}<//>` : html`<${Tile} name="time from first to last step">${duration(data.seconds)}<//>`}
    <${Tile} name="actors up"><a href=${link("actors")}>${figure(data.actors)}</a><//>
    <${Tile} name="restarts">${figure(data.restarts)}<//>
  </div>
  ${data.waits && html`<p class="panel warn" role="status">Waiting: ${data.waits}</p>`}`;
}

/** Curves of several runs; each run is asked for on its own, so that one that cannot be opened hides no other.
 * A pulse gives up no request, so answers that take longer than a pulse arrive, too. */
function useCurves(runs, names, first, last, pulse) {
  const [found, setFound] = useState({});
  const key = JSON.stringify([runs, names, first, last]);
  const asking = useRef({});
  const asked = useRef("");
  useEffect(() => () => {
    Object.values(asking.current).forEach((halt) => halt.abort());
    asking.current = {};
  }, [key]);
  useEffect(() => {
    const again = asked.current === key;
    asked.current = key;
    const own = asking.current;
    runs.filter((run) => !own[run]).forEach((run) => {
      own[run] = new AbortController();
      get("curves", { run, names: names.join(), first, last }, own[run].signal, again)
        .then((data) => setFound((old) => ({ ...old, [run]: { data, key } })))
        .catch((error) => isSilent(error, again) || setFound((old) => ({ ...old, [run]: { ...old[run], error } })))
        .finally(() => delete own[run]);
    });
  }, [key, pulse]);
  return found;
}

function Choice({ names, chosen, runs, others, parameters }) {
  const toggle = (list, name) => (list.includes(name) ? list.filter((each) => each !== name) : [...list, name]).join();
  return html`<details class="panel"><summary>Choose figures and runs</summary>
    <h3>Figures</h3>
    <div class="choice">${names.map((name) => html`<label key=${name}><input type="checkbox" checked=${chosen.includes(name)} onChange=${() => change({ figures: toggle(chosen, name) })} /> ${name}</label>`)}</div>
    <h3>Other runs in the same charts</h3>
    <div class="choice">${runs.map((name) => html`<label key=${name}><input type="checkbox" checked=${others.includes(name)} onChange=${() => change({ with: toggle(others, name) })} /> ${name}</label>`)}</div>
    ${parameters.from && html`<p>Steps ${parameters.from} to ${parameters.to}</p>`}
  </details>`;
}

/** Where to read on about the step that was chosen in a chart. */
function OfStep({ step, evaluated }) {
  return html`<span class="row"><a href=${link("rows", { step })}>Rows</a> <a href=${link("anatomy", { step })}>Batch anatomy</a>
    <a href=${link("timeline", { step })}>Timeline</a> ${evaluated && html`<a href=${link("evaluation", { version: step })}>Held-out answers</a>`}
    <button onClick=${() => change({ at: "" }, true)}>Clear</button></span>`;
}

function Curves({ run, runs, parameters, pulse, theme, evaluated }) {
  const others = (parameters.with || "").split(",").filter(Boolean);
  const wanted = (parameters.figures || "").split(",").filter(Boolean);
  const asked = [...new Set([...FIRST, ...wanted])];
  const all = [run, ...others.filter((name) => name !== run)];
  const found = useCurves(all, asked, parameters.from, parameters.to, pulse);
  const names = [...new Set(all.flatMap((name) => found[name]?.data?.names || []))];
  const chosen = wanted.length ? wanted : FIRST.filter((name) => names.includes(name));
  const factor = Number(parameters.smooth || 0);
  const at = /^[0-9]+$/.test(parameters.at) ? Number(parameters.at) : null;
  const zoom = (from, to) => change({ from: Math.max(0, Math.floor(from)), to: Math.ceil(to) });
  // The same lines as long as there is no news, so that an answer about something else draws no chart again.
  const lines = useMemo(() => new Map(asked.map((name) => [name, all.filter((each) => found[each]?.data?.curves[name]?.steps.length)
    .map((each) => ({ name: each, curve: found[each].data.curves[name] }))])), [found, run, parameters.with, parameters.figures]);
  return html`<section class="stack" aria-label="curves">
    <div class="row">
      <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${factor} onChange=${(e) => change({ smooth: e.target.value === "0" ? "" : e.target.value }, true)} /></label>
      ${parameters.from && html`<button onClick=${() => change({ from: "", to: "" })}>Show all steps</button>`}
      <label>Step <input type="number" min="0" value=${parameters.at ?? ""} placeholder="none" onChange=${(e) => change({ at: e.target.value }, true)} /></label>
      ${at !== null && html`<${OfStep} step=${at} evaluated=${evaluated.includes(at)} />`}
      <span class="dim">Click in a chart to choose a step, drag to zoom.</span>
    </div>
    ${all.filter((name) => found[name]?.error).map((name) => html`<p key=${name} role="alert" class="bad">${name}: ${found[name].error.message}</p>`)}
    <div class="grid">${chosen.map((name) => html`<${Chart} key=${name} title=${name} about=${ABOUT[name]} lines=${lines.get(name)} factor=${factor} theme=${theme} at=${at} onZoom=${zoom} onPick=${(step) => change({ at: step }, true)} />`)}</div>
    ${names.length === 0 && html`<p class="dim">No step has been trained yet.</p>`}
    <${Choice} names=${names} chosen=${chosen} runs=${runs.filter((name) => name !== run)} others=${others} parameters=${parameters} />
  </section>`;
}

/** The ledger, asked again a second after each answer until all batches are checked: the log brings nothing new of
 * them. After an error only news of the log ask again. */
function useLedger(run, pulse) {
  const [ticks, setTicks] = useState(0);
  const ledger = useAnswer("ledger", { run }, pulse + ticks);
  useEffect(() => {
    if (!ledger.data?.checked_from) return undefined;
    const timer = setTimeout(() => setTicks((count) => count + 1), 1000);
    return () => clearTimeout(timer);
  }, [ledger.data]);
  return ledger;
}

export default function RunView({ run, runs, parameters, pulse, theme }) {
  const state = useAnswer("run", { run }, pulse);
  const ledger = useLedger(run, pulse);
  const events = useAnswer("events", { run, last: 100 }, pulse);
  return html`<div class="stack">
    <h2>${run} <small class="dim">${state.data ? `${state.data.algorithm}` : ""}</small></h2>
    <${State} ...${state} />
    ${state.data && html`<${Tiles} data=${state.data} />`}
    ${ledger.data && html`<${Ledger} account=${ledger.data.account} addsUp=${ledger.data.adds_up} checkedFrom=${ledger.data.checked_from} dropped=${ledger.data.dropped} below=${ledger.data.dropped_below_floor} />`}
    <${Curves} run=${run} runs=${runs} parameters=${parameters} pulse=${pulse} theme=${theme} evaluated=${(state.data?.evaluations || []).map(([version]) => version)} />
    ${events.data && html`<div class="panel"><${Table} title="Events" columns=${EVENTS} rows=${events.data.events} id=${(event) => event.sequence} parameters=${parameters} cards /></div>`}
  </div>`;
}
