// The log of a run as server-sent events, read by fetch: an EventSource cannot send a bearer token.
// A reconnect sends the last id received, so no message is lost or doubled, whatever happens to the console.
import { headers } from "./api.js";

const RETRY_MS = 1000;

/**
 * Follow the log of a run from now on, while the page is visible: a browser has six connections for all its pages.
 * @param {string} run name of the run
 * @param {(kind: string, body: object, id: number | null) => void} take called for each event
 * @returns {() => void} stops
 */
export function follow(run, take) {
  let [halted, last, reading] = [false, null, new AbortController()];
  const look = () => document.hidden && reading.abort();
  const read = async () => {
    const more = { "Relax-Pulse": "1", ...(last === null ? {} : { "Last-Event-ID": String(last) }) };
    const response = await fetch(`/api/log?run=${encodeURIComponent(run)}`, { headers: headers(more), signal: reading.signal });
    if (response.status === 401) return "refused";
    if (!response.ok) return "lost";
    take("connected", {}, null);
    for await (const event of events(response.body.getReader())) {
      if (event.id !== null) last = event.id;
      if (event.kind === "reset") last = null;
      take(event.kind, event.body, event.id);
      if (event.kind === "over") return "over";
    }
    return "lost";
  };
  const loop = async () => {
    while (!halted) {
      if (document.hidden) await change();
      if (document.hidden) continue;
      reading = new AbortController();
      const end = await read().catch(() => "lost");
      if (halted) return;
      if (end === "over") await change(); // who comes back to the page sees whether the run is up again
      else if (!document.hidden) {
        take(end, {}, null);
        await new Promise((done) => setTimeout(done, RETRY_MS));
      }
    }
  };
  document.addEventListener("visibilitychange", look);
  loop();
  return () => {
    halted = true;
    document.removeEventListener("visibilitychange", look);
    reading.abort();
  };
}

/** Wait until the page is hidden or visible again. */
function change() {
  return new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}

async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event) yield event;
    }
  }
}

/** Parse one event; null for a comment. */
export function parse(block) {
  let kind = "message";
  let id = null;
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("id: ")) id = Number(line.slice(4));
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? { kind, id, body: JSON.parse(data) } : null;
}
