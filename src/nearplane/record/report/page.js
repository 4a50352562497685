
"use strict";
const rows = [...document.querySelectorAll("#layers tbody tr")];
const heads = [...document.querySelectorAll("#layers th")];

function value(row, column, numeric) {
  const text = row.cells[column].dataset.v ?? row.cells[column].textContent;
  return text === "" ? null : numeric ? Number(text) : text;
}

function sort(column) {
  const head = heads[column], numeric = head.dataset.type === "number";
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const order = (a, b) => {  // cells without a value come last either way
    const x = value(a, column, numeric), y = value(b, column, numeric);
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (numeric ? x - y || 0 : x.localeCompare(y, "en", { numeric: true }));
  };
  heads.forEach((other) => other.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  document.querySelector("#layers tbody").append(...[...rows].sort(order));
}
heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));

const figures = [...document.querySelectorAll("figure.points")].map((figure) => {
  const svg = figure.querySelector("svg[role=img]");
  const ring = svg.appendChild(document.createElementNS(svg.namespaceURI, "circle"));
  ring.setAttribute("class", "ring");
  const marks = new Map([...svg.querySelectorAll("[data-l]")].map((mark) => [mark.dataset.l, mark]));
  return { svg, ring, marks, output: figure.querySelector("output") };
});

function show(layer) {
  for (const { ring, marks, output } of figures) {
    const mark = marks.get(layer), use = mark?.querySelector("use");
    ring.setAttribute("r", use ? 8 : 0);
    if (use) for (const [to, from] of [["cx", "x"], ["cy", "y"]]) ring.setAttribute(to, use.getAttribute(from));
    output.textContent = mark ? mark.querySelector("title").textContent : "";
  }
  rows.forEach((row) => row.classList.toggle("shown", row.dataset.l === layer));
}

function nearest(figure, event) {
  const box = figure.svg.getBoundingClientRect(), at = [event.clientX - box.left, event.clientY - box.top];
  let best = null, least = 40;  // CSS pixels
  for (const [layer, mark] of figure.marks) {
    if (mark.classList.contains("dim")) continue;
    for (const use of mark.querySelectorAll("use")) {
      const far = Math.hypot(use.x.baseVal.value - at[0], use.y.baseVal.value - at[1]);
      if (far < least) [best, least] = [layer, far];
    }
  }
  return best;
}

for (const figure of figures) {
  let shown = null;
  const point = (event) => { shown = nearest(figure, event) ?? shown; if (shown !== null) show(shown); };
  figure.svg.addEventListener("pointermove", point);
  figure.svg.addEventListener("pointerdown", point);
  figure.svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const layers = [...figure.marks].filter(([, mark]) => !mark.classList.contains("dim")).map(([layer]) => layer);
    const next = layers.indexOf(shown) + step;
    shown = layers[Math.max(0, Math.min(layers.length - 1, next))] ?? null;
    if (shown !== null) show(shown);
    event.preventDefault();
  });
}

const input = document.querySelector("#filter"), kinds = [...document.querySelectorAll(".bar button")];
let kind = null;
function filter() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of rows) {
    const name = row.cells[0].textContent.toLowerCase();
    const kept = words.every((word) => name.includes(word)) && (kind === null || row.dataset.k === kind);
    row.hidden = !kept;
    count += kept;
    for (const { marks } of figures) marks.get(row.dataset.l)?.classList.toggle("dim", !kept);
  }
  figures.forEach(({ svg }) => svg.classList.toggle("filtered", count < rows.length));
  kinds.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.k === kind)));
  document.querySelector(".count").textContent = `${count} of ${rows.length} layers`;
}
input.addEventListener("input", filter);
kinds.forEach((button) => button.addEventListener("click", () => {
  kind = kind === button.dataset.k ? null : button.dataset.k;
  filter();
}));
