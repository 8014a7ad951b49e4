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

/** Sentences of events of an ordinary run; the answer of the console has those of failures. */
const SENTENCES = {
  started: (body) => `started as process ${body.pid}`,
  restarted: (body) => `started again as process ${body.pid}`,
  ready: (body) => `ready after ${figure(body.seconds)} s`,
  stopped: () => "ended in order",
  checkpoint: (body) => `version ${body.version} saved in ${body.path}${body.floor > 0 ? `; the rows of steps below ${body.floor} are removed` : ""}`,
  finished: (body) => `all ${figure(body.steps)} steps are trained`,
};

const said = (event) => event.text || (Object.hasOwn(SENTENCES, event.kind) ? SENTENCES[event.kind](event.body) : fields(event.body));

export const EVENTS = [
  { name: "time", label: "Time", tight: true, show: (event) => clock(event.time) },
  { name: "sender", label: "Actor" },
  { name: "kind", label: "Event", show: (event) => words(event.kind) },
  { name: "text", label: "What happened", value: said, show: said },
  { name: "sequence", label: "Sequence", number: true },
];
