// Files to save: CSV, JSON and PNG of what a view shows.
export function save(name, content) {
  const address = URL.createObjectURL(content);
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** A cell of a CSV file. A text that a spreadsheet would take for a formula gets a leading apostrophe. */
function cell(value) {
  const text = value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function csv(columns, rows) {
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

export function saveCsv(name, columns, rows) {
  save(`${name}.csv`, new Blob([csv(columns, rows)], { type: "text/csv" }));
}

export function saveJson(name, body) {
  save(`${name}.json`, new Blob([JSON.stringify(body, null, 1)], { type: "application/json" }));
}

export function savePng(name, canvas) {
  const copy = document.createElement("canvas");
  copy.width = canvas.width;
  copy.height = canvas.height;
  const context = copy.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  copy.toBlob((content) => save(`${name}.png`, content));
}
