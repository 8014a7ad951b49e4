// What a view shows while it has no answer, and when there is none.
import { html } from "./html.js";

/** Show an error beside the last answer, or that the first one is awaited. */
export function State({ data, error }) {
  if (error) return html`<p role="alert" class="panel bad">${error.message}</p>`;
  return data ? null : html`<p class="dim" role="status">Loading ...</p>`;
}
