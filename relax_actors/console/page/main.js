// The frame of the page: which run, which view, whether the console and the broker answer, theme and keyboard.
import { ApiError, get } from "./lib/api.js";
import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./lib/html.js";
import { follow } from "./lib/log.js";
import { change, link, useRoute } from "./lib/route.js";
import { takeToken } from "./lib/session.js";
import { VIEWS } from "./views/index.js";

const PULSE_MS = 1000;

function stored(key, otherwise) {
  return localStorage.getItem(`relax-console-${key}`) ?? otherwise;
}

function useStored(key, otherwise) {
  const [value, setValue] = useState(stored(key, otherwise));
  return [value, (next) => { localStorage.setItem(`relax-console-${key}`, next); setValue(next); }];
}

function useTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [theme, setTheme] = useStored("theme", dark ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  return [theme, () => setTheme(theme === "dark" ? "light" : "dark")];
}

/** Follow the log of a run; returns a number that changes with news, and what is wrong with the connection. */
function useLog(run) {
  const [pulse, setPulse] = useState(0);
  const [problem, setProblem] = useState("");
  const [live, setLive] = useState(true);
  useEffect(() => {
    if (!run) return undefined;
    const seen = { first: null, last: null, count: 0, begun: false };
    let due = null;
    const beat = () => { due ??= setTimeout(() => { due = null; setPulse((n) => n + 1); }, PULSE_MS); };
    const stop = follow(run, (kind, body, id) => {
      if (kind === "connected") setProblem("");
      if (kind === "lost") setProblem("The console does not answer. The page goes on by itself when it is back.");
      if (kind === "refused") setProblem("The console was started again and has a new link. Open the link that it printed.");
      if (kind === "state") setProblem(body.problem);
      if (kind === "begin") {
        seen.begun = true;
        document.body.dataset.logBegun = run;
        setLive(true);
      }
      if (kind === "over") {
        if (seen.begun && body.problem) setProblem(`${body.problem}. Reload the page to see how it ended.`);
        seen.begun = false;
        setLive(false);
        return;
      }
      if (kind === "log") {
        seen.first ??= id;
        seen.last = id;
        seen.count += 1;
        Object.assign(document.body.dataset, { logFirst: seen.first, logLast: id, logCount: seen.count });
        dispatchEvent(new CustomEvent("relax-log", { detail: body }));
      }
      beat();
    });
    return () => { stop(); clearTimeout(due); delete document.body.dataset.logBegun; };
  }, [run]);
  return { pulse, problem, live };
}

function NotLoaded() {
  return html`<p class="panel bad" role="alert">The console did not send this view. Reload the page when it answers again.</p>`;
}

function useView(name) {
  const [view, setView] = useState(null);
  useEffect(() => {
    const entry = VIEWS.find((each) => each.name === name);
    let left = false; // a view that loads late must not take the place of the one that was chosen after it
    setView(null);
    if (entry) {
      entry.load().then((module) => module.default, () => NotLoaded)
        .then((component) => left || setView({ name, component }));
    }
    return () => { left = true; };
  }, [name]);
  return view && view.name === name ? view.component : null;
}

function useKeys(enabled, actions) {
  useEffect(() => {
    const press = (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey;
      const action = actions[event.key];
      if (enabled && !typing && action) { event.preventDefault(); action(); }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
}

function Help({ dialog, keys, setKeys }) {
  return html`<dialog ref=${dialog} aria-labelledby="help-title">
    <h2 id="help-title">Keyboard</h2>
    <ul>${VIEWS.slice(0, 10).map((view, i) => html`<li key=${view.name}><kbd>${(i + 1) % 10}</kbd> ${view.title}</li>`)}
      <li><kbd>t</kbd> dark or light</li><li><kbd>?</kbd> this list</li></ul>
    <p><label><input type="checkbox" checked=${keys === "on"} onChange=${(e) => setKeys(e.target.checked ? "on" : "off")} /> use these keys</label></p>
    <button onClick=${() => dialog.current.close()}>Close</button>
  </dialog>`;
}

function Shown({ view: View, ...props }) {
  const [error, reset] = useErrorBoundary();
  if (error) return html`<div class="panel" role="alert"><p class="bad">This view failed: ${error.message}</p><button onClick=${reset}>Try again</button></div>`;
  return html`<${View} ...${props} />`;
}

function Frame({ session, runs }) {
  const route = useRoute();
  const run = route.parameters.run || session.run;
  const [theme, toggle] = useTheme();
  const [keys, setKeys] = useStored("keys", "on");
  const { pulse, problem, live } = useLog(run);
  const view = useView(route.view);
  const dialog = useRef(null);
  const known = VIEWS.some((each) => each.name === route.view);
  const go = Object.fromEntries(VIEWS.slice(0, 10).map((each, i) => [String((i + 1) % 10), () => { location.hash = link(each.name); }]));
  useKeys(keys === "on", { ...go, t: toggle, "?": () => dialog.current.showModal() });
  useEffect(() => { document.title = `${run} · ${route.view} · relax`; }, [run, route.view]);
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header>
      <h1>relax</h1>
      <label>Run <select value=${run} onChange=${(e) => change({ run: e.target.value, from: "", to: "" })}>
        ${runs.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      <nav aria-label="Views"><ul>${VIEWS.map((each) => html`<li key=${each.name}>
        <a href=${link(each.name)} aria-current=${each.name === route.view ? "page" : undefined}>${each.title}</a></li>`)}</ul></nav>
      <span class="grow"></span>
      <button onClick=${toggle}>${theme === "dark" ? "Light" : "Dark"}</button>
      <button onClick=${() => dialog.current.showModal()}>Keys</button>
    </header>
    ${problem && html`<p class="notice warn" role="status">${problem}</p>`}
    <main id="main" tabindex="-1">
      ${!known && html`<p class="panel">There is no view “${route.view}”. <a href=${link("run")}>Show the run</a></p>`}
      ${known && !view && html`<p class="dim" role="status">Loading ...</p>`}
      ${view && html`<${Shown} key=${`${route.view} ${run}`} view=${view} run=${run} runs=${runs} parameters=${route.parameters} live=${live} pulse=${pulse} theme=${theme} session=${session} />`}
    </main>
    <${Help} dialog=${dialog} keys=${keys} setKeys=${setKeys} />`;
}

function App() {
  const [state, setState] = useState({});
  useEffect(() => {
    const ask = () => Promise.all([get("session"), get("runs")])
      .then(([session, found]) => setState({ session, runs: found.runs }))
      .catch((error) => setState({ error }));
    ask();
    addEventListener("relax-token", ask);
    return () => removeEventListener("relax-token", ask);
  }, []);
  if (state.error) {
    const lost = state.error instanceof ApiError && state.error.status === 401;
    return html`<main class="pad"><h1>relax console</h1><p role="alert" class="bad">${state.error.message}</p>
      ${lost && html`<p>The link has the form <code>http://127.0.0.1:PORT/#token=...</code>; <code>relax console RUN</code> prints it again.</p>`}</main>`;
  }
  return state.session ? html`<${Frame} ...${state} />` : html`<p class="pad" role="status">Loading ...</p>`;
}

takeToken();
// Before the listeners of the views, which must not see a token as a route.
addEventListener("hashchange", (event) => {
  const before = new URL(event.oldURL).hash;
  if (takeToken(before.startsWith("#/") ? before : "#/run")) dispatchEvent(new Event("relax-token"));
});
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);
