// Actors of each role as wanted and as they are, and what changed these numbers; operators change them here.
import { post } from "../lib/api.js";
import { useAnswer } from "../lib/answer.js";
import { clock } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

const EVENTS = [
  { name: "time", label: "Time", tight: true, show: (event) => clock(event.time) },
  { name: "sender", label: "Actor" },
  { name: "kind", label: "Event", show: (event) => event.kind.replaceAll("_", " ") },
  { name: "text", label: "What happened", show: (event) => event.text || html`<code>${JSON.stringify(event.body)}</code>` },
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
      <div class="panel">${state.data.events.length
        ? html`<${Table} title="Changes" columns=${EVENTS} rows=${state.data.events} id=${(event) => event.sequence} cards />`
        : html`<p>No change of these numbers is in the log. <code>relax scale ${run} rollout=2</code> makes one.</p>`}</div>`}
  </div>`;
}
