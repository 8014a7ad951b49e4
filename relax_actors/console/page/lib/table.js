// A table that draws only the rows in sight, so that 100,000 rows stay smooth; short tables are drawn whole.
import { saveCsv, saveJson } from "./export.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { change } from "./route.js";

const ROW = 34;
const WHOLE = 200;
const MARGIN = 10;

/** Whether rows can be sorted by a column: it has a `value`, or the field of its name is plain in all rows. */
export function sortable(column, rows) {
  if (column.value) return true;
  const values = rows.map((row) => row[column.name]);
  return values.some((value) => value !== undefined) && values.every((value) => value === null || typeof value !== "object");
}

/**
 * Return rows in the order of a column: of `name` ascending, of `-name` descending; unknown values come last.
 * A column with a `value` is sorted by it, others by the field of their name.
 */
export function sorted(rows, sort, columns = []) {
  if (!sort) return rows;
  const [name, sign] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
  const value = columns.find((column) => column.name === name)?.value || ((row) => row[name]);
  const of = (row) => {
    const known = value(row);
    return known === null || known === "" ? undefined : known;
  };
  return [...rows].sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x === undefined || y === undefined) return Number(x === undefined) - Number(y === undefined);
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  });
}

function Head({ column: c, sort, canSort }) {
  const by = sort === c.name ? "ascending" : sort === `-${c.name}` ? "descending" : undefined;
  const next = by === undefined ? `-${c.name}` : by === "descending" ? c.name : "";
  return html`<th scope="col" class=${c.number ? "number" : ""} aria-sort=${by}>${canSort
    ? html`<button class="sort" title="sort by this column" onClick=${() => change({ sort: next }, true)}>${c.label}${by ? (by === "ascending" ? " ▲" : " ▼") : ""}</button>`
    : c.label}</th>`;
}

/**
 * @param {object} props
 * @param {string} props.title caption, and name of saved files
 * @param {{name: string, label: string, number?: boolean, tight?: boolean, show?: (row: object) => any,
 *   value?: (row: object) => any}[]} props.columns `value` is a number or text to sort by, if the field `name` of a row is not
 * @param {object[]} props.rows
 * @param {(row: object) => string} [props.id] key of a row
 * @param {boolean} [props.cards] whether a narrow screen shows each row as a card
 * @param {object} [props.parameters] of the link, which keeps the order of a table that can be sorted
 * @param {any} [props.children] shown between the title and the table
 */
export function Table({ title, columns, rows: given, id, cards = false, parameters = null, children }) {
  const box = useRef(null);
  const sort = parameters?.sort && columns.some((c) => c.name === parameters.sort.replace(/^-/, "") && sortable(c, given)) ? parameters.sort : "";
  const rows = useMemo(() => sorted(given, sort, columns), [given, sort]);
  const [sight, setSight] = useState([0, 60]);
  const virtual = rows.length > WHOLE;
  useEffect(() => {
    const look = () => {
      const first = Math.max(0, Math.floor(box.current.scrollTop / ROW) - MARGIN);
      setSight([first, first + Math.ceil(box.current.clientHeight / ROW) + 2 * MARGIN]);
    };
    if (virtual) look();
    box.current.addEventListener("scroll", look);
    return () => box.current?.removeEventListener("scroll", look);
  }, [virtual]);
  const [first, last] = virtual ? [Math.min(sight[0], rows.length), Math.min(sight[1], rows.length)] : [0, rows.length];
  const space = (height) => height > 0 && html`<tr aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${height}px`, padding: 0 }}></td></tr>`;
  const values = () => rows.map((row) => columns.map((c) => (c.value && !(c.name in row) ? c.value(row) : row[c.name])));
  return html`<section class="stack">
    <div class="row spread">
      <h3>${title}</h3>
      <div class="row">
        <button aria-label=${`save ${title} as CSV`} onClick=${() => saveCsv(title, columns.map((c) => c.name), values())}>CSV</button>
        <button aria-label=${`save ${title} as JSON`} onClick=${() => saveJson(title, rows)}>JSON</button>
      </div>
    </div>
    ${children}
    <div class="scroll" ref=${box} tabindex="0" role="region" aria-label=${title}>
      <table class=${cards ? "cards" : ""} aria-rowcount=${rows.length}>
        <thead><tr>${columns.map((c) => html`<${Head} key=${c.name} column=${c} sort=${sort} canSort=${parameters !== null && sortable(c, given)} />`)}</tr></thead>
        <tbody>
          ${space(first * ROW)}
          ${rows.slice(first, last).map((row, i) => html`<tr key=${id ? id(row) : first + i}>
            ${columns.map((c) => html`<td key=${c.name} data-label=${c.label} class=${c.number ? "number" : c.tight ? "tight" : ""}>${c.show ? c.show(row) : row[c.name]}</td>`)}
          </tr>`)}
          ${space((rows.length - last) * ROW)}
        </tbody>
      </table>
    </div>
  </section>`;
}
