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

// Of a chart with a line for each task, the chosen one stands out, with its band; the others are faint behind it.
function tracesOf(chart) {
  const traces = [];
  const { members } = chart.about;
  chart.lines = members.flatMap(([task, metric], at) => linesOf(metric).map((line) => ({ ...line, task, member: chart.many ? at : null })));
  chart.traces = new Map(); // of a trace, the line whose points it shows
  for (const line of [...chart.lines].sort((a, b) => (a.member === chart.chosen) - (b.member === chart.chosen))) {
    const style = styleOf(line.runs[0].index, line.member);
    const chosen = !chart.many || line.member === chart.chosen;
    const behind = chart.many && chart.chosen !== null && !chosen;
    const rgb = behind ? faint(colour(style.colour), 0.22) : colour(style.colour);
    const band = state.bands && chosen ? bandOf(line.points, rgb) : null;
    if (band) traces.push(band);
    if (line.raw && chosen) {
      traces.push({
        x: line.raw.map((point) => point[state.axis]), y: line.raw.map((point) => point.y), mode: "lines",
        line: { color: faint(rgb, 0.3), width: 1 }, hoverinfo: "skip", showlegend: false, meta: "raw",
      });
    }
    chart.traces.set(traces.length, line);
    traces.push({
      x: line.points.map((point) => point[state.axis]), y: line.points.map((point) => point.y),
      customdata: line.points.map((point) => (point.e === null ? "" : ` ± ${fmt(point.e, 2)}`)),
      mode: "lines+markers", name: nameOf(line), meta: "line",
      line: { color: rgb, width: !chart.many ? 2 : chosen ? 3 : 1.5, dash: DASHES[style.dash] },
      marker: { color: rgb, symbol: SYMBOLS[style.shape], size: chart.many && !chosen ? 5 : 7, maxdisplayed: 9, line: { color: rgb, width: 1.5 } },
      hovertemplate: chart.many ? `${nameOf(line)} %{y:.4g}%{customdata}<extra></extra>` : "%{y:.4g}%{customdata}", showlegend: false,
    });
  }
  return traces;
}

const nameOf = (line) => [line.task, line.task && RUNS.length === 1 ? "" : line.label].filter(Boolean).join(" · ");

function layoutOf(chart) {
  const ink = colour("--ink"), grid = colour("--line"), paper = colour("--card");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, ticks: "", fixedrange: false };
  return {
    height: chart.wide ? 464 : 210, margin: { l: 44, r: 10, t: 6, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11, family: "system-ui, sans-serif" },
    xaxis: { ...axis, title: { text: state.axis, standoff: 4, font: { size: 11 } }, nticks: 6 },
    yaxis: { ...axis, type: state.log ? "log" : "linear", nticks: 5, exponentformat: "power" },
    hovermode: chart.many ? "closest" : "x unified", hoverlabel: { bgcolor: paper, bordercolor: grid, font: { color: ink, size: 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls
    uirevision: state.axis + state.log, // what was zoomed to stays while the lines change
  };
}

function draw(chart) {
  chart.stale = false;
  chart.card.setAttribute("aria-busy", "false");
  Plotly.react(chart.plot, tracesOf(chart), layoutOf(chart), QUIET);
  if (!chart.ready) {
    chart.ready = true;
    chart.plot.on("plotly_hover", (event) => tell(chart, event.points[0]));
    chart.plot.on("plotly_unhover", () => tell(chart, null));
    chart.plot.on("plotly_click", (event) => clicked(chart, event));
  }
  if (chart.legend) fillLegend(chart);
  tell(chart, null);
}

// What the chart says in words: the values at the cursor, else the last ones.
function tell(chart, at) {
  const under = at && chart.traces.get(at.curveNumber);
  const step = under?.points[at.pointNumber]?.step;
  const told = !chart.many ? chart.lines : under ? [under] : chart.lines.filter((line) => line.member === chart.chosen);
  const said = [];
  for (const line of told) {
    const known = step === null || step === undefined ? line.points.at(-1) : nearest(line.points, step);
    if (!known) continue;
    const error = known.e === null ? "" : ` ± ${fmt(known.e, 2)}`;
    said.push(el("span", {}, el("b", {}, nameOf(line)), ` ${fmt(known.y)}${error}`, el("span", { class: "quiet" }, ` step ${fmt(known.step)}`)));
  }
  const hint = chart.many && chart.lines.length ? `${plural(chart.about.members.length, "line")}; choose one in the list, or point at it.` : "No run that is shown has this metric.";
  fill(chart.says, said.length ? said : hint);
  for (const option of chart.legend?.children ?? []) option.classList.toggle("under", under?.member === Number(option.dataset.member));
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
  lookBehind(line.runs[0].index, line.points[point.pointNumber].step, taskOf(chart, line));
}

// The task of a line, as groups are tagged with it: within an entry of a mixture, behind the entry's name.
function taskOf(chart, line) {
  if (!chart.many) return null;
  const within = chart.name.match(/^(?:eval\/)?task\/([^*]+)\/\*/);
  return within ? `${within[1]}/${line.task}` : line.task;
}

function keyed(chart, event) {
  const line = chart.lines?.find((one) => one.member === chart.chosen) ?? chart.lines?.[0];
  if (!line || !line.points.length) return;
  const last = line.points.length - 1;
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(last / 10), PageDown: Math.ceil(last / 10), Home: -Infinity, End: Infinity };
  if (event.key === "Enter") {
    lookBehind(line.runs[0].index, line.points[Math.min(chart.cursor ?? last, last)].step, taskOf(chart, line));
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

function makeChart(about) {
  const { name } = about;
  const many = about.members.length > 1;
  const chart = { name, about, many, wide: about.members.length > 6, chosen: null, near: false, stale: true, plot: el("div", { class: "plot", id: `plot-${charts.length}` }), says: el("p", { class: "says" }) };
  if (many) chart.legend = legendOf(chart);
  const band = about.band ? ` Band: standard error, ${about.band}.` : "";
  chart.card = el(
    "figure",
    { class: `chart${chart.wide ? " across" : ""}`, tabindex: "0", "data-metric": name, "aria-busy": "true", "aria-label": `${about.title || name}. ${about.sentence}`, keydown: (event) => keyed(chart, event) },
    el("figcaption", {}, el("b", {}, readable(about.title || name)), about.unit ? el("span", { class: "unit" }, about.unit) : null, el("span", { class: "quiet" }, about.title ? el("code", {}, readable(name), " ") : null, about.sentence + band)),
    many ? el("div", { class: "plotted" }, chart.plot, chart.legend) : chart.plot,
    chart.says,
  );
  charts.push(chart);
  return chart;
}

// The lines of a chart, the highest first; one stop of the Tab key, arrow keys choose, Enter leads to the task's groups.
function legendOf(chart) {
  const legend = el("div", { class: "legend", role: "listbox", tabindex: "0", "aria-label": `Lines of ${chart.about.title}` });
  const choose = (member) => {
    chart.chosen = chart.chosen === member ? null : member;
    redrawOne(chart);
  };
  legend.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (option) choose(Number(option.dataset.member));
  });
  legend.addEventListener("keydown", (event) => {
    const order = [...legend.children].map((option) => Number(option.dataset.member));
    const at = order.indexOf(chart.chosen);
    const moves = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") choose(chart.chosen);
    else if (event.key in moves) choose(order[Math.max(0, Math.min(order.length - 1, at < 0 ? 0 : at + moves[event.key]))]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return legend;
}

function redrawOne(chart) {
  if (window.Plotly && chart.ready) draw(chart);
}

function fillLegend(chart) {
  const known = chart.about.members.map(([task], member) => {
    const lines = chart.lines.filter((line) => line.member === member && line.points.length);
    const last = lines.map((line) => line.points.at(-1).y);
    return { task, member, lines, rank: last.length ? last.reduce((sum, y) => sum + y, 0) / last.length : -Infinity };
  });
  known.sort((a, b) => b.rank - a.rank || a.member - b.member);
  const values = ({ lines }) => lines.map((line) => el("span", {}, RUNS.length > 1 ? el("b", {}, `${line.label} `) : null, line.points.length > 1 ? `${fmt(line.points[0].y, 3)} → ` : "", fmt(line.points.at(-1).y, 3)));
  const options = known.map((each) =>
    el(
      "div",
      { role: "option", id: `${chart.plot.id}-${each.member}`, "data-member": each.member, "aria-selected": each.member === chart.chosen ? "true" : "false" },
      swatch(styleOf(RUNS.length > 1 ? 0 : each.lines[0]?.runs[0].index ?? 0, each.member)),
      el("span", { class: "task" }, readable(each.task)),
      el("span", { class: "ends" }, each.lines.length ? values(each) : "–"),
    ),
  );
  const top = chart.legend.scrollTop;
  fill(chart.legend, options);
  chart.legend.scrollTop = top;
  const selected = chart.legend.querySelector("[aria-selected=true]");
  if (!selected) return chart.legend.removeAttribute("aria-activedescendant");
  chart.legend.setAttribute("aria-activedescendant", selected.id);
  const [low, high] = [selected.offsetTop, selected.offsetTop + selected.offsetHeight - chart.legend.clientHeight];
  return (chart.legend.scrollTop = Math.max(high, Math.min(low, chart.legend.scrollTop)));
}

// Of metrics that never change, their value; a chart of it would be a straight line.
function constantValue({ members }) {
  let value, same = true;
  const look = (_, found) => ((same &&= value === undefined || value === found), (value = found));
  for (const run of RUNS) for (const [, metric] of members) eachValue(run.columns[metric], look);
  return same ? value : undefined;
}

function buildCharts() {
  const families = new Map();
  for (const about of DATA.charts) families.set(about.family, [...(families.get(about.family) ?? []), about]);
  const watcher = new IntersectionObserver(watch, { rootMargin: "200px" });
  for (const [title, abouts] of families) {
    const still = abouts.filter((about) => constantValue(about) !== undefined && longest(about) > 1);
    const cards = abouts.filter((about) => !still.includes(about)).map((about) => makeChart(about).card);
    cards.forEach((card) => watcher.observe(card));
    const always = still.map((about) => `${about.name} ${fmt(constantValue(about))}`).join(", ");
    byId("charts").append(
      el("div", { class: "family" }, el("h3", {}, title), el("div", { class: "grid" }, cards), always ? el("p", { class: "quiet still" }, `The same all along: ${always}.`) : null),
    );
  }
}

const longest = ({ members }) => Math.max(...RUNS.flatMap((run) => members.map(([, metric]) => run.columns[metric]?.v.length ?? 0)));

function watch(entries) {
  for (const entry of entries) {
    const chart = charts.find((one) => one.card === entry.target);
    chart.near = entry.isIntersecting;
    if (chart.near && chart.stale) stale(chart);
  }
}

const wordsOfChart = ({ about }) => [about.name, about.title, ...about.members.flat()].join(" ").toLowerCase();

function findMetrics() {
  const wanted = byId("find-metric").value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  for (const chart of charts) chart.card.hidden = wanted.length > 0 && !wanted.some((word) => wordsOfChart(chart).includes(word));
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
