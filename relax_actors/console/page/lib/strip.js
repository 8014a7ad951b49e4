// Tokens of a sequence, coloured by log-prob, entropy, advantage, version, mask, or another number that a role wrote.
import { figure } from "./format.js";
import { html, useState } from "./html.js";
import { change } from "./route.js";
import { Table } from "./table.js";

const SHADES = 7;
const SIGNED = ["advantage"];
const LABELS = { logprob: "log-prob" };
/** Numbers of which a high one is the remarkable one, as a low log-prob is. */
const REVERSED = ["entropy"];

/** Return the bounds by which numbers are coloured: 0 in the middle if they have a sign. */
export function bounds(name, values) {
  const known = values.filter((value) => value !== null);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!known.length) return [0, 0];
  const size = Math.max(Math.abs(low), Math.abs(high));
  return SIGNED.includes(name) ? [-size, size] : [low, high];
}

/** Return the shade of a number: 0 is lowest, 6 highest, of an entropy the other way round; null for none. */
export function shade(value, [low, high], name = "") {
  if (value === null || value === undefined) return null;
  const height = REVERSED.includes(name) ? high - value : value - low;
  return high > low ? Math.min(SHADES - 1, Math.floor((SHADES * height) / (high - low))) : Math.floor(SHADES / 2);
}

function classOf(strip, by, limits, versions, i) {
  if (by === "mask") return strip.mask[i] ? "tok trained" : "tok";
  if (by === "version") return strip.versions[i] < 0 ? "tok" : `tok v${versions.indexOf(strip.versions[i]) % 6}`;
  const own = shade(strip.numbers[by][i], limits, by);
  return own === null ? "tok" : `tok s${own}`;
}

/** Text of a token in which white space is seen. */
export function spelled(strip, i) {
  const text = strip.texts.length ? strip.texts[i] : ` ${strip.ids[i]}`;
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅";
}

function facts(strip, i, first) {
  const numbers = Object.entries(strip.numbers).filter(([, values]) => values[i] !== null).map(([name, values]) => `${LABELS[name] || name} ${figure(values[i])}`);
  const version = strip.versions[i] < 0 ? "not sampled" : `version ${strip.versions[i]}`;
  return [`token ${first + i}, id ${strip.ids[i]}`, version, strip.mask[i] ? "trained" : "not trained", ...numbers].join(", ");
}

/**
 * @param {{strip: object, first: number, number: number}} props `first` is the index of the first token
 */
export function Strip({ strip, first, number, parameters }) {
  const names = [...Object.keys(strip.numbers), "version", "mask"];
  const chosen = parameters.colour || "logprob";
  const [about, setAbout] = useState("");
  const by = names.includes(chosen) ? chosen : "mask";
  const limits = strip.numbers[by] ? bounds(by, strip.numbers[by]) : [0, 0];
  const versions = [...new Set(strip.versions)].filter((version) => version >= 0).sort((a, b) => a - b);
  const columns = [
    { name: "index", label: "Token", number: true }, { name: "id", label: "Id", number: true },
    { name: "text", label: "Text", show: (row) => html`<code>${row.text}</code>` },
    { name: "trained", label: "Trained", show: (row) => (row.trained ? "yes" : "") },
    { name: "version", label: "Version", number: true, show: (row) => (row.version < 0 ? "" : row.version) },
    ...Object.keys(strip.numbers).map((name) => ({ name, label: LABELS[name] || name, number: true, show: (row) => (row[name] === null ? "" : figure(row[name])) })),
  ];
  const rows = () => strip.ids.map((id, i) => ({
    index: first + i, id, text: spelled(strip, i), trained: strip.mask[i], version: strip.versions[i],
    ...Object.fromEntries(Object.entries(strip.numbers).map(([name, values]) => [name, values[i]])),
  }));
  return html`<section class="panel stack" aria-label=${`tokens of sequence ${number}`}>
    <div class="row spread"><h3>Tokens${strip.player ? ` of ${strip.player}` : ""}</h3>
      <label>Colour by <select value=${by} onChange=${(e) => change({ colour: e.target.value === "logprob" ? "" : e.target.value }, true)}>${names.map((name) => html`<option key=${name} value=${name}>${LABELS[name] || name}</option>`)}</select></label></div>
    <p class="dim">${by === "mask" ? "Marked tokens are trained." : by === "version" ? `Versions ${versions.join(", ") || "none"}; tokens without a colour were not sampled.` : `From ${figure(limits[0])} to ${figure(limits[1])}; tokens without a colour have no ${LABELS[by] || by}.`}${by === "entropy" ? " High entropies have the colours of low log-probs." : ""} Underlined tokens are trained.</p>
    <pre class="strip" tabindex="0" onClick=${(e) => e.target.dataset.i !== undefined && setAbout(facts(strip, Number(e.target.dataset.i), first))}>${strip.ids.map((_, i) => html`<span key=${i} data-i=${i} class=${`${classOf(strip, by, limits, versions, i)}${strip.mask[i] ? " own" : ""}`} title=${facts(strip, i, first)}>${spelled(strip, i)}</span>`)}</pre>
    <p role="status">${about || html`<span class="dim">Click a token for its numbers.${strip.texts.length ? "" : " Tokens are shown as ids: the run has no tokenizer on this machine."}</span>`}</p>
    <details><summary>Tokens as a table</summary><${Table} title="Tokens" columns=${columns} rows=${rows()} id=${(row) => row.index} /></details>
  </section>`;
}
