// A chart of curves over steps: one line a run, with the band of what a point stands for; drag to zoom.
import uPlot from "../vendor/uplot.js";
import { saveCsv, saveJson, savePng } from "./export.js";
import { figure } from "./format.js";
import { html, useEffect, useRef } from "./html.js";

const COLOURS = 8;

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

function options(lines, width, onZoom, theme) {
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
    width, height: 220, series, bands, theme,
    axes: [{ ...axis, size: 36 }, { ...axis, values: (_, ticks) => ticks.map((tick) => figure(tick)) }],
    scales: { x: { time: false } },
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false } },
    hooks: {
      setSelect: [(plot) => {
        if (plot.select.width > 4) onZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
      }],
    },
  };
}

/**
 * @param {{title: string, lines: {name: string, curve: object}[], factor: number, theme: string, onZoom: Function}} props
 */
export function Chart({ title, lines, factor = 0, theme, onZoom }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = columns(lines, factor);
  const names = lines.map((line) => line.name).join();
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(lines, place.current.clientWidth, onZoom, theme), data, place.current);
    };
    draw();
    const watch = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height: 220 }));
    watch.observe(place.current);
    return () => { watch.disconnect(); plot.current?.destroy(); plot.current = null; };
  }, [names, theme]);
  useEffect(() => plot.current?.setData(data));
  const last = lines.map((line) => [line.name, line.curve.mean.at(-1)]);
  const summary = last.map(([name, value]) => `${name}: ${figure(value)}`).join(", ");
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
    <div class="chart" ref=${place} role="img" aria-label=${`${title} by step; newest values: ${summary}`}></div>
    <div class="legend">${last.map(([name, value], i) => html`<span key=${name}><i style=${{ background: `var(--c${i % COLOURS})` }}></i>${name} ${figure(value)}</span>`)}</div>
  </section>`;
}
