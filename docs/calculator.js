// Fills the table of the calculator's page: the ways that fit, from the sizes in the page.
const known = JSON.parse(document.getElementById("sizes").textContent);
const chosen = (name) => document.getElementById(name).value;
const gigabytes = (bytes) => (bytes / 1e9).toFixed(2);

function show() {
  const model = known.models[chosen("model")], memory = 1e9 * Number(chosen("memory")), runtime = chosen("runtime");
  const cache = model.caches[known.contexts.indexOf(Number(chosen("context").replaceAll(",", "")))];
  const place = document.getElementById("ways");
  if (cache === undefined) {
    place.textContent = `${chosen("model")} has no context of ${chosen("context")} tokens.`;
    return;
  }
  const ways = known.modes
    .map((mode, number) => ({ ...mode, sizes: model.sizes[number] }))
    .filter((way) => way.sizes && (runtime === "any" || way.runtimes.includes(runtime)))
    .map((way) => ({ ...way, total: way.sizes[1] + cache }))
    .sort((one, other) => one.loss[0] - other.loss[0] || one.total - other.total);
  const fitting = ways.filter((way) => way.total <= memory);
  const table = document.createElement("table");
  const heads = ["nearplane quantize", "weights, GB", "memory, GB", "KL ratio", "over models", "read by"];
  table.createTHead().insertRow().append(...heads.map((head) => element("th", head)));
  const body = table.createTBody();
  for (const way of fitting) {
    const option = document.createElement("td");
    option.append(element("code", way.options));
    const [mean, low, high] = way.loss;
    const cells = [gigabytes(way.sizes[0]), gigabytes(way.total), mean, `${low} to ${high}`, way.runtimes.join(", ")];
    body.insertRow().append(option, ...cells.map((cell) => element("td", cell)));
  }
  const least = ways.reduce((one, other) => (other.total < one.total ? other : one), ways[0]);
  let said = `${fitting.length} of ${ways.length} ways fit. The cache takes ${gigabytes(cache)} GB.`;
  if (ways.length === 0) said = "This program reads none of these ways for this model.";
  else if (fitting.length === 0) said = `Nothing fits: the smallest, ${least.options}, takes ${gigabytes(least.total)} GB.`;
  place.replaceChildren(element("p", said), ...(fitting.length ? [table] : []));
}

function element(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

document.getElementById("calculator").addEventListener("input", show);
document.getElementById("calculator").addEventListener("submit", (event) => event.preventDefault());
show();
