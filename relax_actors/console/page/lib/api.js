// Requests to the console. Every answer is JSON; an error carries a text that people can act on.
import { token } from "./session.js";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function headers(more = {}) {
  return { Authorization: `Bearer ${token()}`, ...more };
}

function url(name, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `/api/${name}${query ? `?${query}` : ""}`;
}

async function send(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the console does not answer; start it again with `relax console RUN`", "unreachable");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    const failed = body.error || {};
    throw new ApiError(response.status, failed.message || `the console answered ${response.status}`, failed.code || "");
  }
  return response;
}

/** Return the answer `/api/<name>` as an object; a pulse is a request of the page itself, which starts no broker. */
export async function get(name, parameters = {}, signal = undefined, pulse = false) {
  return (await send(url(name, parameters), { headers: headers(pulse ? { "Relax-Pulse": "1" } : {}), signal })).json();
}

/** Return a binary answer, such as a picture, as a Blob. */
export async function blob(name, parameters = {}) {
  return (await send(url(name, parameters), { headers: headers() })).blob();
}

/** Request an operation; needs the token of an operator. */
export async function post(name, parameters, body) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) };
  return (await send(url(name, parameters), options)).json();
}
