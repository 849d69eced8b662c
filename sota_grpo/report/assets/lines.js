// The lines of a chart: points of each run, smoothed, or the mean over the seeds of one config; of each task, too.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const STROKES = ["", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x-thin-open"];
const SHAPES = ["M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3-3h6v6h-6z", "M0-4.5l4.5 4.5l-4.5 4.5l-4.5-4.5z", "M0-4l4 7h-8z", "M-3.5-3.5l7 7m0-7l-7 7"];
const COLOURS = 8;
const WIDTHS = [1, 3, 5, 11, 21, 51, 101, 201]; // steps that smoothing takes the mean of

const runColour = (index) => `--run-${index % COLOURS}`;

// What a line looks like. Of one metric it is its run's; of several tasks colour and mark are the task's, and the
// dash is the run's, or the task's where there is one run: 40 tasks are told apart, 30 without colour.
function styleOf(run, task = null) {
  if (task === null) return { colour: runColour(run), dash: run % DASHES.length, shape: run % SHAPES.length };
  return { colour: runColour(task), dash: (RUNS.length > 1 ? run : Math.floor(task / SHAPES.length)) % DASHES.length, shape: task % SHAPES.length };
}

function swatch({ colour, dash, shape }) {
  const space = "http://www.w3.org/2000/svg";
  const make = (tag, attributes) => {
    const node = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const picture = make("svg", { class: "swatch", viewBox: "-20 -7 40 14", width: 40, height: 14, "aria-hidden": "true" });
  const stroke = `var(${colour})`;
  picture.append(
    make("path", { d: "M-20 0H20", style: `fill:none;stroke:${stroke};stroke-width:2;stroke-dasharray:${STROKES[dash] || "none"}` }),
    make("path", { d: SHAPES[shape], style: `fill:${stroke};stroke:${stroke};stroke-width:1.5` }),
  );
  return picture;
}

const badge = (run) => el("span", { class: "badge" }, swatch(styleOf(run.index)), el("b", {}, run.label));

function eachValue(column, visit) {
  if (!column) return;
  const places = column.i;
  column.v.forEach((value, at) => value !== null && visit(places ? places[at] : at, value));
}

function pointsOf(run, name) {
  const errors = new Map();
  eachValue(run.errors[name], (at, value) => errors.set(at, value));
  const points = [];
  const back = name.startsWith("eval/") ? 1 : 0; // an evaluation comes before its step
  eachValue(run.columns[name], (at, y) =>
    points.push({
      step: run.steps[at],
      steps: run.steps[at],
      responses: run.responses[at - back] ?? 0,
      minutes: (run.seconds[at - back] ?? 0) / 60,
      y,
      e: errors.has(at) ? errors.get(at) : null,
    }),
  );
  return points;
}

// The mean over the points within `half` steps on either side; its error takes the steps as independent.
function smoothed(points, half) {
  if (!half) return points;
  let low = 0, high = 0, sum = 0, squares = 0, known = 0;
  const count = (point, sign) => {
    sum += sign * point.y;
    squares += sign * (point.e ?? 0) ** 2;
    known += point.e === null ? 0 : sign;
  };
  return points.map((point) => {
    while (high < points.length && points[high].step <= point.step + half) count(points[high++], 1);
    while (points[low].step < point.step - half) count(points[low++], -1);
    const number = high - low;
    return { ...point, y: sum / number, e: known === number ? Math.sqrt(Math.max(0, squares)) / number : null };
  });
}

// Mean and standard error over runs, at the steps that all of them have.
function meanOver(lines) {
  const at = new Map();
  for (const line of lines) for (const point of line) at.set(point.step, [...(at.get(point.step) ?? []), point]);
  const mean = (points, key) => points.reduce((sum, point) => sum + point[key], 0) / points.length;
  const found = [];
  for (const [step, points] of at) {
    if (points.length < lines.length) continue;
    const y = mean(points, "y");
    const variance = points.reduce((sum, point) => sum + (point.y - y) ** 2, 0) / (points.length - 1);
    const x = Object.fromEntries(["steps", "responses", "minutes"].map((key) => [key, mean(points, key)]));
    found.push({ step, ...x, y, e: Math.sqrt(variance / points.length) });
  }
  return found.sort((a, b) => a.step - b.step);
}

// What a chart shows: one line per run, or per config where the mean over seeds is asked for.
function linesOf(name) {
  const sets = state.means ? DATA.seeds : RUNS.map((run) => [run.index]);
  const found = [];
  for (const members of sets) {
    const runs = members.map((index) => RUNS[index]).filter((run) => state.shown.has(run.index) && run.columns[name]);
    if (!runs.length) continue;
    const raw = runs.map((run) => pointsOf(run, name));
    const smooth = raw.map((points) => smoothed(points, state.half));
    const several = runs.length > 1;
    found.push({
      label: runs.map((run) => run.label).join("+"),
      runs,
      points: several ? meanOver(smooth) : smooth[0],
      raw: state.half ? (several ? meanOver(raw) : raw[0]) : null,
    });
  }
  return found;
}
