// The log of a run as server-sent events, read by fetch: an EventSource cannot send a bearer token.
// A reconnect sends the last id received, so no message is lost or doubled, whatever happens to the console.
import { headers } from "./api.js";

const RETRY_MS = 1000;

/**
 * Follow the log of a run from now on.
 * @param {string} run name of the run
 * @param {(kind: string, body: object, id: number | null) => void} take called for each event
 * @returns {() => void} stops
 */
export function follow(run, take) {
  const halt = new AbortController();
  let last = null;
  const loop = async () => {
    while (!halt.signal.aborted) {
      try {
        const more = last === null ? {} : { "Last-Event-ID": String(last) };
        const response = await fetch(`/api/log?run=${encodeURIComponent(run)}`, { headers: headers(more), signal: halt.signal });
        if (!response.ok) throw new Error(String(response.status));
        take("connected", {}, null);
        for await (const event of events(response.body.getReader())) {
          if (event.id !== null) last = event.id;
          if (event.kind === "reset") last = null;
          take(event.kind, event.body, event.id);
          if (event.kind === "over") return;
        }
      } catch (error) {
        if (halt.signal.aborted) return;
      }
      take("lost", {}, null);
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  };
  loop();
  return () => halt.abort();
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
