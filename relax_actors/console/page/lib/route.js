// The state of the page is its fragment, `#/<view>?<parameters>`, so that every state has a link.
import { useEffect, useState } from "./html.js";

export function parse(fragment) {
  const [path, query = ""] = fragment.replace(/^#\/?/, "").split("?");
  return { view: path || "run", parameters: Object.fromEntries(new URLSearchParams(query)) };
}

/** Return the link of a view. Parameters that are empty are left out; the run stays unless it is given. */
export function link(view, parameters = {}) {
  const run = parse(location.hash).parameters.run;
  const all = { ...(run ? { run } : {}), ...parameters };
  const given = Object.entries(all).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** Change parameters of the present view; `replace` adds no entry to the history. */
export function change(parameters, replace = false) {
  const route = parse(location.hash);
  const target = link(route.view, { ...route.parameters, ...parameters });
  if (replace) {
    const before = location.href;
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange", { oldURL: before, newURL: location.href }));
  } else {
    location.hash = target;
  }
}

export function useRoute() {
  const [route, setRoute] = useState(parse(location.hash));
  useEffect(() => {
    const update = () => setRoute(parse(location.hash));
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}
