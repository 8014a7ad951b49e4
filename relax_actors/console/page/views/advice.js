// What is wrong with the run, and what to do about it: the findings of `relax doctor`.
import { useAnswer } from "../lib/answer.js";
import { html, useState } from "../lib/html.js";
import { State } from "../lib/state.js";

export default function AdviceView({ run }) {
  const [asked, setAsked] = useState(0);
  const state = useAnswer("advice", { run }, asked);
  const findings = state.data?.findings || [];
  return html`<div class="stack">
    <div class="row spread"><h2>Advice</h2><button onClick=${() => setAsked(asked + 1)}>Examine again</button></div>
    <${State} ...${state} />
    ${state.data && !findings.some((finding) => finding.is_problem) && html`<p class="panel good">Run ${run} is healthy.</p>`}
    ${findings.map((finding, i) => html`<section class="panel" key=${i}>
      <h3 class=${finding.is_problem ? "bad" : "warn"}>${finding.is_problem ? "Problem" : "Note"}</h3><p>${finding.text}</p></section>`)}
  </div>`;
}
