"use strict";
const content = JSON.parse(document.getElementById("content").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = (given) => ({ ...given, gridcolor: of("--edge"), zerolinecolor: of("--edge"), automargin: true });
  return {
    margin: { l: 60, r: 10, t: 20, b: 50 }, height: 420, legend: { orientation: "h", y: 1.12 },
    ...layout,
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: of("--ink") },
    colorway: dark.matches ? ["#6cb6ff", "#ffab5e", "#7ee0a1", "#d2a8ff"] : ["#1769aa", "#c25e00", "#23804c", "#8250b5"],
    modebar: { bgcolor: "rgba(0,0,0,0)", color: of("--edge"), activecolor: of("--ink") },
  };
}

// On a touch screen the tool bar would lie over the legend for good.
const bar = window.matchMedia("(hover: hover)").matches ? "hover" : false;

function draw() {
  for (const [name, plot] of Object.entries(content.plots)) {
    const place = document.getElementById(name + "-plot");
    Plotly.react(place, plot.data, themed(plot.layout), { responsive: true, displaylogo: false, displayModeBar: bar });
  }
}

// Four digits of what was measured, all of what was counted.
function spelled(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : (+value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
}

function cell(kind, value, isNumber) {
  const made = document.createElement(kind);
  const text = value === null ? "" : typeof value === "number" ? spelled(value) : value;
  // Names of kernels may break behind each trait.
  for (const part of text.split(/(?<=_)/)) made.append(part, document.createElement("wbr"));
  if (isNumber) made.className = "number";
  else if (text.length > 24) made.className = "long";
  return made;
}

function ordered(rows, at, sign) {
  return [...rows].sort((a, b) => {
    const [x, y] = [a[at], b[at]];
    if (x === y) return 0;
    if (x === null) return 1;
    if (y === null) return -1;
    return (typeof x === "number" ? x - y : String(x).localeCompare(String(y))) * sign;
  });
}

function table(place, { columns, rows }) {
  const numeric = columns.map((_, at) => rows.length > 0 && rows.every((row) => row[at] === null || typeof row[at] === "number"));
  const filter = document.createElement("input");
  filter.type = "search";
  filter.placeholder = "filter";
  filter.setAttribute("aria-label", "filter rows");
  const count = document.createElement("p");
  count.className = "count";
  const shown = document.createElement("table");
  const head = shown.createTHead().insertRow();
  const body = shown.createTBody();
  let at = -1, sign = 1;
  function fill() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) => { const text = row.join(" ").toLowerCase(); return words.every((word) => text.includes(word)); });
    const made = (at < 0 ? kept : ordered(kept, at, sign)).map((row) => {
      const line = document.createElement("tr");
      if (columns.includes("range") && row[columns.indexOf("problems")] === 0) line.className = "hole";
      line.append(...row.map((value, i) => cell("td", value, numeric[i])));
      return line;
    });
    body.replaceChildren(...made);
    count.textContent = made.length.toLocaleString() + " of " + rows.length.toLocaleString() + " rows";
  }
  columns.forEach((name, i) => {
    const made = cell("th", name, numeric[i]);
    made.tabIndex = 0;
    const sort = () => {
      sign = at === i ? -sign : 1;
      at = i;
      for (const other of head.cells) other.removeAttribute("aria-sort");
      made.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      fill();
    };
    made.addEventListener("click", sort);
    made.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    head.append(made);
  });
  filter.addEventListener("input", fill);
  const frame = document.createElement("div");
  frame.className = "scroll";
  frame.append(shown);
  place.append(filter, frame, count);
  fill();
}

for (const [name, text] of Object.entries(content.notes)) {
  const place = document.getElementById(name + "-note");
  if (place) place.textContent = text;
}
for (const [name, given] of Object.entries(content.tables)) table(document.getElementById(name + "-table"), given);
draw();
dark.addEventListener("change", draw);
