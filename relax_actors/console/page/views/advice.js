// What is wrong with the run, how it is known, and what to do: the findings of `relax doctor`.
import { useAnswer } from "../lib/answer.js";
import { figure } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { link } from "../lib/route.js";
import { State } from "../lib/state.js";

function Evidence({ evidence }) {
  const figures = Object.entries(evidence.figures || {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const [first, last] = evidence.steps || [];
  return html`<li><code>${evidence.subject}</code>${evidence.steps && html`, <a href=${link("rows", { step: last })}>steps ${figure(first)} to ${figure(last)}</a>`}${figures && `: ${figures}`}</li>`;
}

function Finding({ finding }) {
  return html`<section class="panel">
    <h3 class=${finding.is_problem ? "bad" : "warn"}>${finding.is_problem ? "Problem" : "Note"}${finding.rule && `: ${finding.rule.replaceAll("_", " ")}`}</h3>
    <p>${finding.text}</p>
    ${finding.remedy && html`<p><strong>What to do:</strong> ${finding.remedy}</p>`}
    ${finding.settings.length > 0 && html`<p class="dim">Settings that move it: ${finding.settings.map((name, i) => html`${i > 0 && ", "}<code key=${name}>${name}</code>`)}</p>`}
    ${finding.evidence.length > 0 && html`<details><summary>How it is known</summary><ul>${finding.evidence.map((each, i) => html`<${Evidence} key=${i} evidence=${each} />`)}</ul></details>`}
  </section>`;
}

export default function AdviceView({ run }) {
  const [asked, setAsked] = useState(0);
  const state = useAnswer("advice", { run }, asked);
  const findings = state.data?.findings || [];
  return html`<div class="stack">
    <div class="row spread"><h2>Advice</h2><button onClick=${() => setAsked(asked + 1)}>Examine again</button></div>
    <${State} ...${state} />
    ${state.data && !findings.some((finding) => finding.is_problem) && html`<p class="panel good">Run ${run} is healthy.</p>`}
    ${findings.map((finding, i) => html`<${Finding} key=${`${finding.rule} ${i}`} finding=${finding} />`)}
  </div>`;
}
