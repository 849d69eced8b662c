// The runs: which are shown, how far they are, and in which options they differ.

function stateOf(run) {
  const steps = run.asked === null || run.done === run.asked ? plural(run.done, "step") : `${fmt(run.done)} of ${plural(run.asked, "step")}`;
  return el("td", {}, `${run.state}, ${steps}`, run.note ? el("span", { class: "help quiet" }, readable(run.note)) : null);
}

function accuracyOf(run) {
  const counts = new Map(pointsOf(run, "eval/num_samples").map((point) => [point.step, point.y]));
  const most = Math.max(...counts.values());
  const points = pointsOf(run, "eval/accuracy").filter((point) => (counts.get(point.step) ?? most) === most); // no subsets
  if (!points.length) return "–";
  const say = (point) => percent(point.y) + (point.e === null ? "" : ` ± ${(100 * point.e).toFixed(1)}`);
  return points.length === 1 ? say(points[0]) : `${say(points[0])} → ${say(points.at(-1))}`;
}

// Of a run's beginning and end as many steps as do not overlap, 10 at most.
function rewardEnds(run) {
  const values = pointsOf(run, "reward").map((point) => point.y);
  const count = Math.max(1, Math.min(10, Math.floor(values.length / 2)));
  const say = (some) => fmt(some.reduce((sum, value) => sum + value, 0) / some.length, 3);
  if (values.length < 2) return values.length ? say(values) : "–";
  return `${say(values.slice(0, count))} → ${say(values.slice(-count))}`;
}

function toggled() {
  state.shown = new Set(boxes().filter((box) => box.checked).map((box) => Number(box.dataset.run)));
  fillKey();
  redraw();
}

const boxes = () => [...document.querySelectorAll("#runs-table [data-run]")];

function toggleAll(event) {
  for (const box of boxes()) box.checked = event.target.checked;
  toggled();
}

function fillKey() {
  fill(byId("key"), RUNS.length > 1 ? RUNS.filter((run) => state.shown.has(run.index)).map(badge) : null);
}

function runRow(run) {
  const box = el("input", { type: "checkbox", checked: true, "aria-label": `show run ${run.label}`, "data-run": run.index, change: toggled });
  return [
    el("td", { class: "nowrap" }, RUNS.length > 1 ? box : null, badge(run)),
    rowHead(el("span", { title: run.path }, readable(run.name))),
    accuracyOf(run),
    rewardEnds(run),
    stateOf(run),
    duration(run.phases.total),
    el("td", { class: "nowrap" }, run.written),
  ];
}

function differencesTable() {
  const rows = DATA.options.filter((option) => option.differs);
  if (!rows.length) return el("p", { class: "quiet" }, "Their configs are equal.");
  const head = ["Option", ...RUNS.map((run) => el("th", {}, badge(run)))];
  const body = rows.map((option) => [rowHead(readable(option.name)), ...option.values.map((value) => el("td", {}, value === null ? "–" : readable(value)))]);
  return wide("Config differences", table(head, body, { id: "differences-table" }));
}

function startRuns() {
  const one = RUNS.length === 1;
  byId("about").textContent = `${one ? RUNS[0].path : plural(RUNS.length, "run")} · written ${DATA.made}`;
  document.title = `Training report · ${one ? RUNS[0].name : plural(RUNS.length, "run")}`;
  const all = one ? "" : el("input", { type: "checkbox", id: "all-runs", "aria-label": "show all runs", checked: true, change: toggleAll });
  const head = [all, "Run", "Held-out accuracy", "Reward (first → last steps)", "State", "Time in steps", "Last written"];
  byId("runs-table").append(table(head, RUNS.map(runRow)));
  const notes = [];
  if (DATA.stride > 1) notes.push(`Every ${DATA.stride}th step is in the curves, all evaluations are.`);
  for (const members of SEEDED) notes.push(`${members.map((index) => RUNS[index].label).join(", ")} are seeds of one config.`);
  byId("runs-notes").textContent = notes.join(" ");
  if (DATA.left_out.length) {
    const said = DATA.left_out.map((sentence) => el("li", {}, readable(sentence)));
    byId("runs-notes").after(el("details", { id: "left-out", open: said.length < 4 }, el("summary", {}, `${said.length} left out`), el("ul", {}, said)));
  }
  const starts = RUNS.flatMap((run) => run.starts.map((start) => el("li", {}, one ? null : badge(run), " ", readable(start))));
  if (starts.length) byId("runs-notes").after(el("details", { id: "starts" }, el("summary", {}, "Command, code and machine of each start"), el("ul", {}, starts)));
  if (!one) byId("differences").append(el("h3", {}, "What differs in their configs"), differencesTable());
  fillKey();
}
