// The charts: drawn when they come into view, drawn again when something changes that they show.

const charts = [];
const waiting = new Set();
const QUIET = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset", scrollZoom: false };

function colour(name) {
  const probe = byId("key");
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = "";
  return found;
}

const faint = (rgb, alpha) => `rgba(${rgb.match(/[\d.]+/g).slice(0, 3).join(",")},${alpha})`;

function bandOf(points, rgb) {
  const known = points.filter((point) => point.e !== null);
  if (!known.length) return null;
  const floor = (point) => (state.log ? Math.max(point.y - point.e, point.y / 10) : point.y - point.e);
  const back = [...known].reverse();
  return {
    x: [...known, ...back].map((point) => point[state.axis]),
    y: [...known.map((point) => point.y + point.e), ...back.map(floor)],
    mode: "lines", fill: "toself", fillcolor: faint(rgb, 0.18), line: { color: faint(rgb, 0.5), width: 0.5 },
    hoverinfo: "skip", showlegend: false, meta: "band",
  };
}

function tracesOf(chart) {
  const traces = [];
  chart.lines = linesOf(chart.name);
  chart.traces = new Map(); // of a trace, the line whose points it shows
  for (const line of chart.lines) {
    const index = line.runs[0].index;
    const rgb = colour(runColour(index));
    const band = state.bands ? bandOf(line.points, rgb) : null;
    if (band) traces.push(band);
    if (line.raw) {
      traces.push({
        x: line.raw.map((point) => point[state.axis]), y: line.raw.map((point) => point.y), mode: "lines",
        line: { color: faint(rgb, 0.3), width: 1 }, hoverinfo: "skip", showlegend: false, meta: "raw",
      });
    }
    chart.traces.set(traces.length, line);
    traces.push({
      x: line.points.map((point) => point[state.axis]), y: line.points.map((point) => point.y),
      customdata: line.points.map((point) => (point.e === null ? "" : ` ± ${fmt(point.e, 2)}`)),
      mode: "lines+markers", name: line.label, meta: "line",
      line: { color: rgb, width: 2, dash: DASHES[index % 6] },
      marker: { color: rgb, symbol: SYMBOLS[index % 5], size: 7, maxdisplayed: 9, line: { color: rgb, width: 1.5 } },
      hovertemplate: "%{y:.4g}%{customdata}", showlegend: false,
    });
  }
  return traces;
}

function layoutOf() {
  const ink = colour("--ink"), grid = colour("--line"), paper = colour("--card");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, ticks: "", fixedrange: false };
  return {
    height: 210, margin: { l: 44, r: 10, t: 6, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11, family: "system-ui, sans-serif" },
    xaxis: { ...axis, title: { text: state.axis, standoff: 4, font: { size: 11 } }, nticks: 6 },
    yaxis: { ...axis, type: state.log ? "log" : "linear", nticks: 5, exponentformat: "power" },
    hovermode: "x unified", hoverlabel: { bgcolor: paper, bordercolor: grid, font: { color: ink, size: 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls uirevision: state.axis + state.log,
  };
}

function draw(chart) {
  chart.stale = false;
  chart.card.setAttribute("aria-busy", "false");
  Plotly.react(chart.plot, tracesOf(chart), layoutOf(), QUIET);
  if (!chart.ready) {
    chart.ready = true;
    chart.plot.on("plotly_hover", (event) => tell(chart, event.points[0]));
    chart.plot.on("plotly_unhover", () => tell(chart, null));
    chart.plot.on("plotly_click", (event) => clicked(chart, event));
  }
  tell(chart, null);
}

// What the chart says in words: the values at the cursor, else the last ones.
function tell(chart, at) {
  const step = at && chart.traces.get(at.curveNumber)?.points[at.pointNumber]?.step;
  const said = [];
  for (const line of chart.lines) {
    const known = step === null || step === undefined ? line.points.at(-1) : nearest(line.points, step);
    if (!known) continue;
    const error = known.e === null ? "" : ` ± ${fmt(known.e, 2)}`;
    said.push(el("span", {}, el("b", {}, line.label), ` ${fmt(known.y)}${error}`, el("span", { class: "quiet" }, ` step ${fmt(known.step)}`)));
  }
  fill(chart.says, said.length ? said : "No run that is shown has this metric.");
}

function nearest(points, step) {
  return points.reduce((best, point) => (best && Math.abs(best.step - step) <= Math.abs(point.step - step) ? best : point), null);
}

function clicked(chart, event) {
  const top = chart.plot.getBoundingClientRect().top;
  const far = (point) => Math.abs(point.yaxis.d2p(point.y) + point.yaxis._offset + top - event.event.clientY);
  const point = event.points.filter((one) => chart.traces.has(one.curveNumber)).sort((a, b) => far(a) - far(b))[0];
  if (!point) return;
  const line = chart.traces.get(point.curveNumber);
  lookBehind(line.runs[0].index, line.points[point.pointNumber].step);
}

function keyed(chart, event) {
  const line = chart.lines?.[0];
  if (!line || !line.points.length) return;
  const last = line.points.length - 1;
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(last / 10), PageDown: Math.ceil(last / 10), Home: -Infinity, End: Infinity };
  if (event.key === "Enter") {
    lookBehind(line.runs[0].index, line.points[Math.min(chart.cursor ?? last, last)].step);
  } else if (event.key in moves) {
    chart.cursor = Math.max(0, Math.min(last, (chart.cursor ?? last) + moves[event.key]));
    const curve = [...chart.traces].find((entry) => entry[1] === line)[0];
    Plotly.Fx.hover(chart.plot, [{ curveNumber: curve, pointNumber: chart.cursor }]);
    tell(chart, { curveNumber: curve, pointNumber: chart.cursor });
  } else return;
  event.preventDefault();
}

// Stale charts in view are drawn one at a time, so that the page answers in between; the others when they come into view.
function redraw() {
  charts.forEach(stale);
}

function stale(chart) {
  chart.card.setAttribute("aria-busy", "true");
  chart.stale = true;
  if (chart.near && !waiting.size) setTimeout(drawNext);
  if (chart.near) waiting.add(chart);
}

function drawNext() {
  const [chart] = waiting;
  waiting.delete(chart);
  if (chart.stale && chart.near && !chart.card.hidden) draw(chart);
  if (waiting.size) setTimeout(drawNext);
}

function makeChart(name) {
  const about = DATA.metrics[name];
  const chart = { name, near: false, stale: true, plot: el("div", { class: "plot" }), says: el("p", { class: "says" }) };
  const band = about.band ? ` Band: standard error, ${about.band}.` : "";
  chart.card = el(
    "figure",
    { class: "chart", tabindex: "0", "data-metric": name, "aria-busy": "true", "aria-label": `${name}. ${about.sentence}`, keydown: (event) => keyed(chart, event) },
    el("figcaption", {}, el("b", {}, name), about.unit ? el("span", { class: "unit" }, about.unit) : null, el("span", { class: "quiet" }, about.sentence + band)),
    chart.plot,
    chart.says,
  );
  charts.push(chart);
  return chart;
}

// Of a metric that never changes, its value; a chart of it would be a straight line.
function constantValue(name) {
  let value, same = true;
  for (const run of RUNS) eachValue(run.columns[name], (_, found) => ((same &&= value === undefined || value === found), (value = found)));
  return same ? value : undefined;
}

function buildCharts() {
  const families = new Map();
  for (const [name, about] of Object.entries(DATA.metrics)) families.set(about.family, [...(families.get(about.family) ?? []), name]);
  const watcher = new IntersectionObserver(watch, { rootMargin: "200px" });
  for (const [title, names] of families) {
    const still = names.filter((name) => constantValue(name) !== undefined && longest(name) > 1);
    const cards = names.filter((name) => !still.includes(name)).map((name) => makeChart(name).card);
    cards.forEach((card) => watcher.observe(card));
    const always = still.map((name) => `${name} ${fmt(constantValue(name))}`).join(", ");
    byId("charts").append(
      el("div", { class: "family" }, el("h3", {}, title), el("div", { class: "grid" }, cards), always ? el("p", { class: "quiet still" }, `The same all along: ${always}.`) : null),
    );
  }
}

const longest = (name) => Math.max(...RUNS.map((run) => run.columns[name]?.v.length ?? 0));

function watch(entries) {
  for (const entry of entries) {
    const chart = charts.find((one) => one.card === entry.target);
    chart.near = entry.isIntersecting;
    if (chart.near && chart.stale) stale(chart);
  }
}

function findMetrics() {
  const wanted = byId("find-metric").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  for (const chart of charts) chart.card.hidden = wanted.length > 0 && !wanted.some((word) => chart.name.toLowerCase().includes(word));
  for (const family of document.querySelectorAll(".family")) family.hidden = !family.querySelector(".chart:not([hidden])") && wanted.length > 0;
}

function startCurves() {
  const steps = Math.max(...RUNS.map((run) => run.done));
  const fitting = WIDTHS.filter((width) => width === 1 || width <= steps / 20).length - 1;
  byId("smooth").value = fitting;
  const smooth = () => {
    const width = WIDTHS[byId("smooth").value];
    state.half = (width - 1) / 2;
    byId("smooth-says").value = width === 1 ? "none" : `mean of ${width} steps`;
    byId("smooth").setAttribute("aria-valuetext", byId("smooth-says").value);
  };
  smooth();
  byId("means-label").hidden = !SEEDED.length;
  byId("smooth").addEventListener("input", () => (smooth(), redraw()));
  byId("axis").addEventListener("change", (event) => ((state.axis = event.target.value), redraw()));
  for (const name of ["bands", "means", "log"]) byId(name).addEventListener("change", (event) => ((state[name] = event.target.checked), redraw()));
  byId("find-metric").addEventListener("input", findMetrics);
  byId("curve-tools").addEventListener("submit", (event) => event.preventDefault());
  buildCharts();
}
