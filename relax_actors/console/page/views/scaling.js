// Actors of each role as wanted and as they are, and what changed these numbers; operators change them here.
import { post } from "../lib/api.js";
import { useAnswer } from "../lib/answer.js";
import { EVENTS } from "../lib/events.js";
import { clock } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

const GOOD = ["ACTIVE", "REMOVED"];
const BAD = ["FAILED", "CANCELLED"];

function asked({ request }) {
  const number = request.target ?? (request.delta > 0 ? `+${request.delta}` : request.delta);
  return [request.kind.replaceAll("_", " "), request.role, number, request.url, request.engine].filter((part) => part !== undefined && part !== "").join(" ");
}

const OPERATIONS = [
  { name: "id", label: "Number", number: true },
  { name: "request", label: "Request", show: asked },
  { name: "state", label: "State", tight: true, show: (one) => html`<span class=${GOOD.includes(one.state) ? "good" : BAD.includes(one.state) ? "bad" : "warn"}>${one.state}</span>` },
  { name: "times", label: "Since", tight: true, show: (one) => clock(one.times[one.state]) },
  { name: "actors", label: "Actors", show: (one) => one.actors.join(", ") },
  { name: "author", label: "By", show: (one) => one.request.author || "" },
  { name: "reason", label: "Reason" },
];

function Scale({ run, pools }) {
  const [role, setRole] = useState(pools[0]?.role || "");
  const [number, setNumber] = useState("1");
  const [said, setSaid] = useState(null);
  const send = (event) => {
    event.preventDefault();
    setSaid({ text: "requesting ..." });
    post("scale", { run }, { role, actors: Number(number) })
      .then((answer) => setSaid({ text: `requested as operation ${answer.operations.join(", ")}` }))
      .catch((error) => setSaid({ text: error.message, bad: true }));
  };
  return html`<form class="panel row" onSubmit=${send}>
    <label>Role <select value=${role} onChange=${(e) => setRole(e.target.value)}>${pools.map((pool) => html`<option key=${pool.role}>${pool.role}</option>`)}</select></label>
    <label>Actors <input type="number" min="1" max="4096" value=${number} onInput=${(e) => setNumber(e.target.value)} /></label>
    <button>Scale</button>
    ${said && html`<span role="status" class=${said.bad ? "bad" : ""}>${said.text}</span>`}
  </form>`;
}

export default function ScalingView({ run, pulse, session }) {
  const state = useAnswer("scaling", { run }, pulse);
  const columns = [
    { name: "role", label: "Role" },
    { name: "wanted", label: "Wanted", number: true, show: (pool) => pool.wanted ?? "not set" },
    { name: "present", label: "Present", number: true },
  ];
  return html`<div class="stack">
    <h2>Scaling</h2>
    <${State} ...${state} />
    ${state.data && html`
      ${session.operations.includes("scale") && html`<${Scale} run=${run} pools=${state.data.pools} />`}
      <div class="panel"><${Table} title="Actors by role" columns=${columns} rows=${state.data.pools} id=${(pool) => pool.role} cards /></div>
      <div class="panel">${state.data.operations.length
        ? html`<${Table} title="Operations" columns=${OPERATIONS} rows=${state.data.operations} id=${(one) => one.id} cards />`
        : html`<p>Nobody has requested an operation. <code>relax scale ${run} rollout=2</code> requests one.</p>`}</div>
      ${state.data.events.length > 0 && html`<div class="panel"><${Table} title="Decisions of the autoscaler" columns=${EVENTS} rows=${state.data.events} id=${(event) => event.sequence} cards /></div>`}`}
  </div>`;
}
