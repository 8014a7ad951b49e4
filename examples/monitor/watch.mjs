// Print each step of a run: node watch.mjs demo ws://127.0.0.1:8443 keys/observer/nats.creds
import { readFileSync } from "node:fs";
import { connect, credsAuthenticator, JSONCodec } from "nats.ws";

globalThis.WebSocket ??= (await import("ws")).default;  // browsers and Node 22 have one
const [run, url, credentials] = process.argv.slice(2);
const authenticator = credsAuthenticator(readFileSync(credentials));
const connection = await connect({ servers: url, authenticator });

for await (const message of connection.subscribe(`relax.${run}.metric.trainer.*`)) {
  const body = JSONCodec().decode(message.data);
  if (body.kind === "step") console.log(`step ${body.step} reward ${body.reward.toFixed(3)}`);
}
