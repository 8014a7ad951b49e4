// What each actor did when: a lane an actor, or several where its work overlaps, on one canvas.
import { useAnswer } from "../lib/answer.js";
import { blob } from "../lib/api.js";
import { save, saveJson, savePng } from "../lib/export.js";
import { clock, counted, figure } from "../lib/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../lib/html.js";
import { choose, Pick } from "../lib/pick.js";
import { change, link } from "../lib/route.js";
import { State } from "../lib/state.js";
import { Table } from "../lib/table.js";

const ROW = 18;
const LABEL = 130;
const AXIS = 22;
const COLOURS = 8;
const FEW = 4;
const AFTER_WHEEL = 200; // milliseconds
const LEAST = 1e-4; // seconds
const KEYS = ["role", "node", "every", "outlier"];

/** First index whose value is at least `wanted`, in ascending values. */
export function lowerBound(values, wanted) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return at most `most` + 1 round times between two times, in seconds. */
export function ticks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((each) => each >= rough);
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.max(0, Math.floor(to / step) - first + 1) }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

/**
 * Lanes whose spans can be searched: `begins` and `ends` are ascending, since spans of a lane do not overlap.
 * Actors that need many lanes come last, so that they do not push the others out of sight.
 */
export function prepare(data) {
  const counts = new Map();
  for (const { actor } of data.lanes) counts.set(actor, (counts.get(actor) || 0) + 1);
  const [narrow, wide] = [(lane) => counts.get(lane.actor) <= FEW, (lane) => counts.get(lane.actor) > FEW];
  return [...data.lanes.filter(narrow), ...data.lanes.filter(wide)].map((lane) => ({
    actor: lane.actor,
    number: lane.number,
    spans: lane.spans,
    begins: Float64Array.from(lane.spans, (span) => span[1]),
    ends: Float64Array.from(lane.spans, (span) => span[1] + span[2]),
  }));
}

/**
 * Bars of a lane: one for each span that is wider than a pixel, one for a run of narrower spans in the same pixel.
 * Its work is bounded by the pixels, not by the spans.
 * @returns {[number, number, number][]} left and width in pixels, and the index of the first span
 */
export function bars(lane, from, to, width) {
  const scale = width / (to - from);
  const found = [];
  let i = lowerBound(lane.ends, from);
  while (i < lane.begins.length && lane.begins[i] < to) {
    const left = Math.max(0, (lane.begins[i] - from) * scale);
    const right = Math.min(width, (lane.ends[i] - from) * scale);
    found.push([left, Math.max(1, right - left), i]);
    i = right - left >= 1 ? i + 1 : Math.max(i + 1, lowerBound(lane.begins, from + (Math.floor(left) + 1) / scale));
  }
  return found;
}

/** Span at a time of a lane; null between spans. */
export function spanAt(lane, time) {
  const i = lowerBound(lane.ends, time);
  return i < lane.begins.length && lane.begins[i] <= time ? lane.spans[i] : null;
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { bars: Array.from({ length: COLOURS }, (_, i) => of(`--c${i}`)), text: of("--text"), dim: of("--dim"), line: of("--line"), ground: of("--ground") };
}

function draw(canvas, lanes, data, view, scrolled) {
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const paint = colours();
  const room = width - LABEL;
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const first = Math.floor(scrolled / ROW);
  const last = Math.min(lanes.length, Math.ceil((scrolled + height) / ROW));
  for (let k = first; k < last; k += 1) {
    const lane = lanes[k];
    const top = AXIS + k * ROW - scrolled;
    context.fillStyle = paint.line;
    context.fillRect(LABEL, top + ROW - 1, room, 1);
    for (const [left, wide, i] of bars(lane, view.from, view.to, room)) {
      context.fillStyle = paint.bars[lane.spans[i][0] % COLOURS];
      context.fillRect(LABEL + left, top + 2, wide, ROW - 5);
    }
    context.fillStyle = lane.number ? paint.dim : paint.text;
    if (!lane.number || k === first) context.fillText(lane.actor, 4, top + ROW / 2, LABEL - 8);
  }
  context.fillStyle = paint.ground;
  context.fillRect(0, 0, width, AXIS);
  for (const at of ticks(view.from, view.to, Math.max(1, Math.min(8, Math.floor(room / 90))))) {
    const x = LABEL + ((at - view.from) / (view.to - view.from)) * room;
    context.fillStyle = paint.line;
    context.fillRect(x, 0, 1, height);
    context.fillStyle = paint.dim;
    if (x + 60 < width) context.fillText(`${figure(at)} s`, x + 4, AXIS / 2);
  }
  context.fillStyle = paint.bars[6];
  for (const instant of data.instants) {
    const x = LABEL + ((instant.time - data.begin - view.from) / (view.to - view.from)) * room;
    if (x >= LABEL && x <= width) context.fillRect(x, AXIS - 5, 2, 5);
  }
}

/** Time by what was done: number of spans, sum and longest. */
export function totals(data) {
  const found = new Map();
  for (const lane of data.lanes) {
    for (const [name, , seconds] of lane.spans) {
      const key = `${lane.actor} ${data.names[name]}`;
      const entry = found.get(key) || { key, actor: lane.actor, name: data.names[name], count: 0, seconds: 0, longest: 0 };
      entry.count += 1;
      entry.seconds += seconds;
      entry.longest = Math.max(entry.longest, seconds);
      found.set(key, entry);
    }
  }
  return [...found.values()].sort((a, b) => b.seconds - a.seconds);
}

const COLUMNS = [
  { name: "actor", label: "Actor" },
  { name: "name", label: "Did" },
  { name: "count", label: "Times", number: true },
  { name: "seconds", label: "Seconds in all", number: true, show: (each) => figure(Number(each.seconds.toFixed(3))) },
  { name: "longest", label: "Longest", number: true, show: (each) => figure(Number(each.longest.toFixed(3))) },
];

function Canvas({ data, lanes, own, theme, onPick }) {
  const { view, now, show, settle } = own;
  const box = useRef(null);
  const canvas = useRef(null);
  const drag = useRef(null);
  const frame = useRef(0);
  const repaint = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => canvas.current && draw(canvas.current, lanes, data, view, box.current.scrollTop));
  };
  useEffect(() => { repaint(); const watch = new ResizeObserver(repaint); watch.observe(box.current); return () => watch.disconnect(); }, [lanes, view.from, view.to, theme]);
  const timeAt = (event) => {
    const edge = canvas.current.getBoundingClientRect();
    const { from, to } = now();
    return from + ((event.clientX - edge.left - LABEL) / (edge.width - LABEL)) * (to - from);
  };
  const pick = (event) => {
    const edge = canvas.current.getBoundingClientRect();
    const lane = lanes[Math.floor((event.clientY - edge.top - AXIS + box.current.scrollTop) / ROW)];
    const span = lane && spanAt(lane, timeAt(event));
    onPick(span ? { actor: lane.actor, span } : null);
  };
  const wheel = (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    show(zoomed(now(), event.deltaY > 0 ? 1.25 : 0.8, timeAt(event)), AFTER_WHEEL);
  };
  const move = (event) => {
    if (!drag.current) { pick(event); return; }
    const edge = canvas.current.getBoundingClientRect();
    const by = ((event.clientX - drag.current.x) / (edge.width - LABEL)) * (drag.current.to - drag.current.from);
    show({ from: drag.current.from - by, to: drag.current.to - by });
  };
  const release = () => {
    const { from, to } = now();
    if (drag.current && (drag.current.from !== from || drag.current.to !== to)) settle({ from, to });
    drag.current = null;
  };
  const height = Math.min(560, AXIS + lanes.length * ROW + 4);
  const style = { height: `${height}px`, width: "100%", position: "sticky", top: 0, display: "block", touchAction: "pan-y" };
  return html`<div ref=${box} onScroll=${repaint} tabindex="0" aria-label="lanes" style=${{ height: `${height}px`, overflowY: "auto" }}>
    <div style=${{ height: `${AXIS + lanes.length * ROW}px` }}>
      <canvas ref=${canvas} style=${style} role="img" aria-label=${`${counted(lanes.length, "lane")} over ${figure(Number((view.to - view.from).toPrecision(3)))} s; the table below has the times`}
        onWheel=${wheel} onPointerMove=${move} onPointerLeave=${release} onPointerUp=${release}
        onPointerDown=${(event) => { drag.current = { x: event.clientX, ...now() }; }} onDblClick=${(event) => settle(zoomed(now(), 0.5, timeAt(event)))}></canvas>
    </div>
  </div>`;
}

/** A view zoomed around a time, at least `LEAST` wide: a link has microseconds. */
export function zoomed(view, factor, around) {
  const width = view.to - view.from;
  if (!width) return view;
  const scale = Math.max(factor, LEAST / width);
  return { from: around - (around - view.from) * scale, to: around + (view.to - around) * scale };
}

/**
 * The part of the timeline in sight. The link keeps it; a drag or a wheel only changes the state and settles at its end,
 * since browsers limit how often a page may change its link.
 * @returns {{view: object, now: () => object, show: (view: object, milliseconds?: number) => void, settle: (view: ?object) => void}}
 *   `now` returns what the next drawing shows: several events may arrive before it. `show` changes the state, and settles
 *   when the time is over. `settle` changes the link, and null shows the whole timeline.
 */
function useOwnView(parameters, whole) {
  const [shown, setShown] = useState(null);
  const timer = useRef(0);
  const newest = useRef(null);
  const drop = () => { clearTimeout(timer.current); setShown(null); };
  useEffect(() => drop, [parameters.step]);
  const settle = (next) => {
    drop();
    change(next ? { from: next.from.toFixed(6), to: next.to.toFixed(6) } : { from: "", to: "" }, true);
  };
  const show = (next, milliseconds) => {
    clearTimeout(timer.current);
    newest.current = next;
    setShown(next);
    if (milliseconds) timer.current = setTimeout(() => settle(next), milliseconds);
  };
  const [from, to] = [Number(parameters.from), Number(parameters.to)];
  const view = shown || (parameters.to !== undefined && to > from ? { from, to } : whole);
  newest.current = view;
  return { view, now: () => newest.current, show, settle };
}

function Picked({ data, picked }) {
  if (!picked) return html`<p class="dim" role="status">Point at a bar. Drag to move, double-click or Ctrl and wheel to zoom.</p>`;
  const [name, begin, seconds, row] = picked.span;
  const id = row < 0 ? "" : data.rows[row];
  return html`<p role="status">${picked.actor}: <strong>${data.names[name]}</strong> for ${figure(Number(seconds.toFixed(4)))} s from ${clock(data.begin + begin)}${id && html`, <a href=${link("sample", { row: id })}>${id}</a>`}</p>`;
}

/** Traces that `relax profile` has written, to save. */
function Profiles({ run, names }) {
  const [failed, setFailed] = useState("");
  const fetched = (name) => blob("profile", { run, name }).then((content) => save(name, content), (error) => setFailed(error.message));
  return html`${names.map((name) => html`<button key=${name} onClick=${() => fetched(name)}>${name}</button> `)}${failed}`;
}

/** What a lane is picked by; an outlier is busy for long. */
function factsOf(actors) {
  const nodes = new Map((actors?.nodes || []).flatMap((node) => node.actors.map((actor) => [actor.name, node.name])));
  return (lane) => ({
    actors: [lane.actor], node: nodes.get(lane.actor) || "", text: lane.actor,
    measure: lane.spans.reduce((sum, span) => sum + span[2], 0),
  });
}

export default function TimelineView({ run, parameters, theme }) {
  const [asked, setAsked] = useState(0);
  const state = useAnswer("timeline", { run, step: parameters.step }, asked);
  const actors = useAnswer("actors", { run });
  const [picked, setPicked] = useState(null);
  const data = state.data;
  const all = useMemo(() => (data ? prepare(data) : []), [data]);
  const shown = useMemo(() => choose(parameters.pick, all, factsOf(actors.data), KEYS), [all, parameters.pick, actors.data]);
  const lanes = shown.items;
  const whole = { from: 0, to: data ? Math.max(1e-3, data.end - data.begin) : 1 };
  const own = useOwnView(parameters, whole);
  const { view, settle } = own;
  const middle = (view.from + view.to) / 2;
  const shift = (share) => settle({ from: view.from + share * (view.to - view.from), to: view.to + share * (view.to - view.from) });
  const place = useRef(null);
  const sums = useMemo(() => (data ? totals(data) : []), [data]);
  return html`<div class="stack">
    <div class="row spread"><h2>Timeline</h2>
      <div class="row">
        <label>Step <input type="number" min="0" value=${parameters.step ?? ""} placeholder="all" onChange=${(e) => change({ step: e.target.value, from: "", to: "" })} /></label>
        <button onClick=${() => setAsked(asked + 1)}>Read again</button>
        <button onClick=${() => settle(zoomed(view, 0.5, middle))}>Zoom in</button>
        <button onClick=${() => settle(zoomed(view, 2, middle))}>Zoom out</button>
        <button onClick=${() => shift(-0.5)}>Earlier</button>
        <button onClick=${() => shift(0.5)}>Later</button>
        <button onClick=${() => settle(null)}>All</button>
        <button aria-label="save the timeline as JSON" onClick=${() => saveJson("timeline", data)}>JSON</button>
        <button aria-label="save the timeline as PNG" onClick=${() => savePng("timeline", place.current.querySelector("canvas"))}>PNG</button>
      </div></div>
    <${State} ...${state} />
    ${data && !all.length && html`<p class="panel warn" role="status">Nothing has happened yet.</p>`}
    ${all.length > 0 && html`
      <${Pick} parameters=${parameters} found=${shown} total=${all.length} keys=${KEYS} measure="busy time" />
      <p class="dim">${clock(data.begin)} to ${clock(data.end)}, by the broker's clock. Rows are shown as long as the table has them.${data.left_out ? ` ${counted(data.left_out, "older span")} left out.` : ""} <code>relax timeline ${run} trace.json</code> writes a file for Perfetto.</p>
      <div class="legend">${data.names.map((name, i) => html`<span key=${name}><i style=${{ background: `var(--c${i % COLOURS})` }}></i>${name}</span>`)}</div>
      <div class="panel" ref=${place}><${Canvas} data=${data} lanes=${lanes} own=${own} theme=${theme} onPick=${setPicked} /></div>
      <${Picked} data=${data} picked=${picked} />
      <${Table} title="Time by actor" columns=${COLUMNS} rows=${sums} id=${(each) => each.key} parameters=${parameters} cards />
      ${data.instants.length > 0 && html`<section class="panel"><h3>Events</h3><ul>${data.instants.slice(-50).map((each, i) => html`<li key=${i}>${clock(each.time)} ${each.actor} ${each.name}${each.name === "profiled" ? html`: <${Profiles} run=${run} names=${each.detail.split(", ")} />` : each.detail ? `: ${each.detail}` : ""}</li>`)}</ul></section>`}`}
  </div>`;
}
