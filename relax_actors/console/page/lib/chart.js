// A chart of curves over steps: one line a run, with the band of what a point stands for. Charts of a view show their
// values at the same step: that under the pointer, or the one that was clicked. Drag to zoom.
import uPlot from "../vendor/uplot.js";
import { saveCsv, saveJson, savePng } from "./export.js";
import { figure, tick } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";

const COLOURS = 8;
const STILL = 4; // pixels: a shorter drag is a click
const HEIGHT = 220;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Exponential moving average, without the bias towards the first value. */
export function smooth(values, factor) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return sum / weight;
  });
}

/** Join curves of several runs into columns over all of their steps. */
export function columns(lines, factor) {
  const steps = [...new Set(lines.flatMap((line) => line.curve.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, i) => [step, i]));
  const column = (curve, values) => {
    const found = new Array(steps.length).fill(undefined);
    curve.steps.forEach((step, i) => { found[at.get(step)] = values[i]; });
    return found;
  };
  return [steps, ...lines.flatMap(({ curve }) => [
    column(curve, smooth(curve.mean, factor)), column(curve, curve.low), column(curve, curve.high),
  ])];
}

/** Index of the point at a step, or of the last one before it; null if there is none, or no step. */
export function indexAt(steps, step) {
  if (step === null || Number.isNaN(step)) return null;
  const after = steps.findIndex((each) => each > step);
  const index = (after === -1 ? steps.length : after) - 1;
  return index < 0 ? null : index;
}

/** Mark the chosen step by a line. */
function mark(plot, step) {
  if (step === null || step < plot.scales.x.min || step > plot.scales.x.max) return;
  const { left, top, width, height } = plot.bbox;
  const x = Math.min(left + width, Math.max(left, plot.valToPos(step, "x", true)));
  plot.ctx.fillStyle = colour("--text");
  plot.ctx.fillRect(x, top, devicePixelRatio, height);
}

/** `use` holds what the newest drawing gave: `zoom`, `hover` and `pick`, and the chosen step `at`. */
function options(lines, width, use, theme) {
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, size: 56 };
  const series = [{ label: "step" }];
  const bands = [];
  lines.forEach((line, i) => {
    const stroke = colour(`--c${i % COLOURS}`);
    const mean = series.length;
    series.push({ label: line.name, stroke, width: 2, spanGaps: true });
    series.push({ label: `${line.name} least`, stroke: `${stroke}00`, width: 0, spanGaps: true, points: { show: false } });
    series.push({ label: `${line.name} largest`, stroke: `${stroke}00`, width: 0, spanGaps: true, points: { show: false } });
    bands.push({ series: [mean + 2, mean + 1], fill: `${stroke}30` });
  });
  return {
    width, height: HEIGHT, series, bands, theme,
    axes: [{ ...axis, size: 36 }, { ...axis, values: (_, ticks) => ticks.map(tick) }],
    scales: { x: { time: false } },
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "steps", setSeries: false } },
    hooks: {
      setSelect: [(plot) => {
        if (plot.select.width > STILL) use.current.zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
      }],
      setCursor: [(plot) => use.current.hover(plot.cursor.left < 0 ? null : plot.cursor.idx ?? null)],
      draw: [(plot) => mark(plot, use.current.at)],
      init: [(plot) => {
        let from = 0;
        plot.over.addEventListener("mousedown", (event) => { from = event.clientX; });
        plot.over.addEventListener("click", (event) => {
          const step = plot.data[0][plot.cursor.idx];
          if (Math.abs(event.clientX - from) <= STILL && step !== undefined) use.current.pick(step);
        });
      }],
    },
  };
}

/**
 * @param {object} props
 * @param {string} props.title
 * @param {string} [props.about] what the chart shows, in a few words
 * @param {{name: string, curve: object}[]} props.lines
 * @param {number} [props.factor] smoothing
 * @param {string} props.theme
 * @param {string} [props.unit] what the horizontal axis counts
 * @param {?number} [props.at] the chosen step
 * @param {(from: number, to: number) => void} [props.onZoom]
 * @param {(step: number) => void} [props.onPick] called for a click on a step
 */
export function Chart({ title, about = "", lines, factor = 0, theme, unit = "step", at = null, onZoom = () => {}, onPick = () => {} }) {
  const place = useRef(null);
  const plot = useRef(null);
  const use = useRef({});
  const [pointed, setPointed] = useState(null);
  const data = useMemo(() => columns(lines, factor), [lines, factor]);
  Object.assign(use.current, { zoom: onZoom, pick: onPick, hover: setPointed, at });
  const names = lines.map((line) => line.name).join();
  const drawn = useRef(null);
  useEffect(() => {
    const width = () => place.current.clientWidth;
    const created = new uPlot(options(lines, width(), use, theme), data, place.current);
    plot.current = created;
    drawn.current = { data, at };
    const watch = new ResizeObserver(() => created.width !== width() && created.setSize({ width: width(), height: HEIGHT }));
    watch.observe(place.current);
    return () => { watch.disconnect(); created.destroy(); plot.current = null; };
  }, [names, theme]);
  useEffect(() => { // not what was drawn when the chart was made
    if (drawn.current.data !== data) plot.current.setData(data);
    else if (drawn.current.at !== at) plot.current.redraw(false);
    drawn.current = { data, at };
  }, [data, at]);
  const last = lines.map((line) => [line.name, line.curve.mean.at(-1)]);
  const summary = last.map(([name, value]) => `${name}: ${figure(value)}`).join(", ");
  const shown = pointed ?? indexAt(data[0], at);
  const values = shown === null ? last : lines.map((line, i) => [line.name, data[1 + 3 * i][shown]]);
  const file = title.replaceAll("/", "-");
  const rows = () => data[0].map((step, i) => [step, ...lines.map((_, k) => data[1 + 3 * k][i])]);
  return html`<section class="panel" aria-label=${`chart of ${title}`}>
    <div class="row spread">
      <h3>${title}</h3>
      <div class="row">
        <button aria-label=${`save ${title} as CSV`} onClick=${() => saveCsv(file, ["step", ...lines.map((l) => l.name)], rows())}>CSV</button>
        <button aria-label=${`save ${title} as JSON`} onClick=${() => saveJson(file, Object.fromEntries(lines.map((l) => [l.name, l.curve])))}>JSON</button>
        <button aria-label=${`save ${title} as PNG`} onClick=${() => savePng(file, place.current.querySelector("canvas"))}>PNG</button>
      </div>
    </div>
    ${about && html`<p class="dim">${about}</p>`}
    <div class="chart" ref=${place} role="img" aria-label=${`${title} by ${unit}; newest values: ${summary}`}></div>
    <div class="legend">${shown !== null && html`<b>${unit} ${figure(data[0][shown])}</b>`}${values.map(([name, value], i) => html`<span key=${name}><i style=${{ background: `var(--c${i % COLOURS})` }}></i>${name} ${value === undefined ? "" : figure(value)}</span>`)}</div>
  </section>`;
}
