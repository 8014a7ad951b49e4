// Choice of rows by a text in the link: `role:rollout node:1 every:10 outlier:5 word`.
import { figure } from "./format.js";
import { html } from "./html.js";
import { change } from "./route.js";

const KEYS = ["role", "node", "every", "outlier"];

/** Parse a text; throws an error that names what is wrong with it. */
export function parsePick(text, keys = KEYS) {
  const terms = { role: [], node: [], every: 1, outlier: null, words: [] };
  for (const term of text.split(/\s+/).filter(Boolean)) {
    const [, key, value] = /^([a-z]+):(.*)$/.exec(term) || [null, "", ""];
    if (!key) terms.words.push(term.toLowerCase());
    else if (!keys.includes(key)) throw new Error(`${key}: is unknown here; use ${keys.map((each) => `${each}:`).join(", ")} or a word`);
    else if (key === "every" || key === "outlier") {
      if (!/^[1-9][0-9]{0,6}$/.test(value)) throw new Error(`${key}: needs a whole number from 1 on, e.g. ${key}:10`);
      terms[key] = Number(value);
    } else terms[key].push(value.toLowerCase());
  }
  return terms;
}

function belongs(actor, wanted) {
  return actor === wanted || actor.startsWith(`${wanted}.`);
}

/**
 * Return the items that a text picks.
 * @param {string} text the text; empty picks all
 * @param {object[]} items what is picked from
 * @param {(item: object) => {actors?: string[], node?: string, text?: string, measure?: number}} facts what is known of an item
 * @param {string[]} keys keys that have a meaning here
 */
export function choose(text, items, facts, keys = KEYS) {
  let terms;
  try {
    terms = parsePick(text || "", keys);
  } catch (error) {
    return { items, problem: error.message };
  }
  const holds = ({ actors = [], node = "", text: shown = "" }) =>
    terms.role.every((role) => actors.some((actor) => belongs(actor.toLowerCase(), role)))
    && terms.node.every((wanted) => node.toLowerCase() === wanted || node.toLowerCase().split(" ").includes(wanted))
    && terms.words.every((word) => shown.toLowerCase().includes(word));
  let found = items.filter((item) => holds(facts(item)));
  if (terms.outlier !== null) {
    const by = (item) => facts(item).measure ?? -Infinity;
    const most = new Set([...found].sort((a, b) => by(b) - by(a)).slice(0, terms.outlier));
    found = found.filter((item) => most.has(item));
  }
  return { items: found.filter((_, i) => i % terms.every === 0), problem: "" };
}

/** Field for the text; `measure` says by what outliers are the largest. */
export function Pick({ parameters, found, total, keys = KEYS, measure }) {
  const examples = { role: "role:rollout", node: "node:1", every: "every:10", outlier: "outlier:5" };
  return html`<div class="row">
    <label>Pick <input type="search" value=${parameters.pick || ""} placeholder=${keys.map((key) => examples[key]).join(" ")} size="34"
      onChange=${(e) => change({ pick: e.target.value.trim() })} /></label>
    <span role="status" class=${found.problem ? "bad" : "dim"}>${found.problem || (parameters.pick ? `${figure(found.items.length)} of ${figure(total)}` : measure ? `outlier: the largest by ${measure}` : "")}</span>
  </div>`;
}
