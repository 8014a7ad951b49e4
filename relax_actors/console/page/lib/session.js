// The token of the console: it arrives in the fragment of the printed link, and stays in this browser for this address.
const KEY = "relax-console-token";

/** Take the token from the fragment, so that it is in no history entry, and go to a route; whether there was one. */
export function takeToken(route = "#/run") {
  const fragment = location.hash.slice(1);
  const match = /(?:^|&)token=([A-Za-z0-9_-]+)/.exec(fragment);
  if (match) {
    localStorage.setItem(KEY, match[1]);
    history.replaceState(null, "", route);
  }
  return match !== null;
}

export function token() {
  return localStorage.getItem(KEY) || "";
}
