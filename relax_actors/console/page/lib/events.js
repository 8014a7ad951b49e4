// Columns of tables of events.
import { clock, figure } from "./format.js";

const KNOWN = ["time", "kind", "role", "n", "traceback"];

function words(name) {
  return name.replaceAll("_", " ");
}

/** Fields of an event that has no sentence of its own. */
function fields(body) {
  return Object.entries(body).filter(([name]) => !KNOWN.includes(name))
    .map(([name, value]) => `${words(name)} ${typeof value === "object" ? JSON.stringify(value) : Number.isInteger(value) ? value : figure(value)}`).join(", ").slice(0, 300);
}

const said = (event) => event.text || fields(event.body);

export const EVENTS = [
  { name: "time", label: "Time", tight: true, show: (event) => clock(event.time) },
  { name: "sender", label: "Actor" },
  { name: "kind", label: "Event", show: (event) => words(event.kind) },
  { name: "text", label: "What happened", value: said, show: said },
  { name: "sequence", label: "Sequence", number: true },
];
