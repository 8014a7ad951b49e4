// Choice of a step: earlier, later, the newest, or by number; the step stands in the link of the view.
import { figure } from "./format.js";
import { html } from "./html.js";
import { change } from "./route.js";

export function StepChoice({ step, newest, parameters }) {
  if (step === null || step === undefined) return null;
  const go = (to) => change({ step: to });
  return html`<div class="row">
    <button disabled=${step === 0} onClick=${() => go(step - 1)}>Earlier</button>
    <label>Step <input type="number" min="0" value=${step} onChange=${(e) => e.target.value !== "" && go(Math.max(0, Math.floor(Number(e.target.value))))} /></label>
    <button disabled=${newest !== null && step >= newest} onClick=${() => go(step + 1)}>Later</button>
    <button disabled=${parameters.step === undefined} onClick=${() => change({ step: "" })}>Newest</button>
    <span class="dim">${newest === null ? "" : `newest step with a batch: ${figure(newest)}`}</span>
  </div>`;
}
