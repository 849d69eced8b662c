// The browser of groups: a list that filters narrow, and one group with its samples side by side.

const PER_PAGE = 40;
const browse = { run: 0, found: [], page: 0, group: null };

const spread = (group) => group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
const hasTokens = (group) => group.samples.some((sample) => sample.pieces);
const wordsIn = (sample) => (sample.pieces ? sample.pieces.join("") : sample.text === undefined ? sample.turns.map((turn) => plainText(turn.text)).join("") : plainText(sample.text));
const isOf = (group, task) => task === "" || group.task === task || (group.task ?? "").startsWith(`${task}/`);

const KINDS = {
  all: () => true,
  signal: (group) => !group.zero,
  zero: (group) => group.zero,
  cut: (group) => group.cut,
  tokens: hasTokens,
};

function findGroups() {
  const run = RUNS[browse.run];
  const from = Number(byId("step-from").value || 0);
  const to = byId("step-to").value === "" ? Infinity : Number(byId("step-to").value);
  const kind = KINDS[byId("group-kind").value];
  const task = byId("group-task").value;
  const wanted = byId("find-text").value.toLowerCase();
  const holds = (group) => [plainText(group.prompt), ...group.samples.map(wordsIn)].some((text) => text.toLowerCase().includes(wanted));
  browse.found = run.groups.filter((group) => group.step >= from && group.step <= to && isOf(group, task) && kind(group) && (!wanted || holds(group)));
  browse.page = 0;
  const left = run.record.total - run.groups.length;
  fill(
    byId("groups-say"),
    `${fmt(browse.found.length)} of the ${plural(run.groups.length, "group")} in this page match.`,
    left > 0 ? ` ${plural(left, "further group")} of this run ${left === 1 ? "is" : "are"} left out to keep the page small; rollouts.jsonl has the best and worst sample of each.` : "",
    run.record.stored.length ? ` All samples with their tokens: steps ${shortList(run.record.stored)}.` : " No stored steps: the best and worst sample of each group, without tokens.",
  );
}

function shortList(steps) {
  return steps.length <= 8 ? steps.join(", ") : `${steps.slice(0, 3).join(", ")}, … ${steps.slice(-3).join(", ")} (${steps.length})`;
}

function flagsOf(group) {
  const flags = [];
  if (group.zero) flags.push(el("span", { class: "flag zero" }, "zero-advantage"));
  if (group.cut) flags.push(el("span", { class: "flag cut" }, "truncated"));
  if (hasTokens(group)) flags.push(el("span", { class: "flag" }, "tokens"));
  return flags;
}

function rewardsOf(group) {
  const rewards = spread(group);
  const low = Math.min(...rewards), high = Math.max(...rewards);
  return low === high ? fmt(low, 3) : `${fmt(low, 3)} … ${fmt(high, 3)}`;
}

function showList() {
  const pages = Math.max(1, Math.ceil(browse.found.length / PER_PAGE));
  const start = browse.page * PER_PAGE;
  const entries = browse.found.slice(start, start + PER_PAGE).map((group, at) =>
    el(
      "div",
      { role: "option", id: `option-${start + at}`, "aria-selected": group === browse.group ? "true" : "false", click: () => showGroup(start + at) },
      el("span", { class: "step" }, `step ${fmt(group.step)}`),
      el("span", { class: "quiet" }, `group ${group.id}`),
      el("span", { class: "rewards" }, `reward ${rewardsOf(group)}`),
      group.task ? el("span", { class: "task quiet" }, readable(group.task)) : null,
      flagsOf(group),
    ),
  );
  fill(byId("group-list"), entries.length ? entries : el("p", { class: "quiet" }, "No group matches."));
  byId("page-says").textContent = `${browse.page + 1} of ${pages}`;
  byId("page-back").disabled = browse.page === 0;
  byId("page-on").disabled = browse.page >= pages - 1;
  byId("group-pages").hidden = pages === 1;
}

function showGroup(at) {
  browse.group = browse.found[at] ?? null;
  if (browse.group) browse.page = Math.floor(at / PER_PAGE);
  showList();
  const list = byId("group-list");
  list.removeAttribute("aria-activedescendant");
  if (browse.group) {
    list.setAttribute("aria-activedescendant", `option-${at}`);
    const option = byId(`option-${at}`);
    list.scrollTop += option.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 2;
  }
  showDetail();
}

function showDetail() {
  hideTip();
  const group = browse.group;
  if (!group) return fill(byId("group"), el("p", { class: "quiet" }, "Choose a group in the list."));
  const whole = group.whole ? plural(group.samples.length, "sample") : group.samples.length === 1 ? "one of its samples, all of one reward" : "its best and its worst sample";
  const samples = [...group.samples].sort((a, b) => b.reward - a.reward || a.id - b.id);
  return fill(
    byId("group"),
    el("h3", {}, `Step ${fmt(group.step)}, group ${group.id} `, flagsOf(group)),
    el("p", { class: "quiet" }, `Run ${RUNS[browse.run].label}, ${whole}, reward ${rewardsOf(group)}`, group.task ? [", task ", readable(group.task)] : null, "."),
    promptOf(group),
    plainText(group.answer) ? [el("h4", {}, "Gold answer"), passage(group.answer, { class: "text answer" })] : null,
    hasTokens(group) ? shadingTools(group) : null,
    el("div", { class: samples.some((sample) => sample.turns) ? "samples dialogs" : "samples" }, samples.map((sample) => sampleCard(group, sample))),
  );
}

function shadingTools(group) {
  const stored = (measure) => measure === "none" || measure === "advantage" || group.samples.some((sample) => sample[measure]);
  if (!stored(shading.measure)) shading.measure = "none";
  const choice = el(
    "select",
    { id: "shade", change: (event) => ((shading.measure = event.target.value), showDetail(), byId("shade").focus()) },
    Object.entries(MEASURES).map(([name, { title }]) => el("option", { value: name, disabled: !stored(name), selected: name === shading.measure }, stored(name) ? title : `${title} (not stored)`)),
  );
  const numbers = el("input", { type: "checkbox", id: "numbers", change: (event) => ((shading.numbers = event.target.checked), showDetail(), byId("numbers").focus()) });
  numbers.checked = shading.numbers;
  return el("div", { class: "shading" }, el("div", { class: "tools" }, el("label", {}, "Shade tokens by ", choice), el("label", {}, numbers, " write the numbers")), scaleOf());
}

function sampleCard(group, sample) {
  const age = sample.version === null ? null : group.step - sample.version;
  const facts = [
    sample.length === null ? null : plural(sample.length, "token"),
    sample.version === null ? null : `policy version ${fmt(sample.version)}${age ? `, ${plural(age, "version")} old` : ""}`,
  ].filter(Boolean);
  const terms = Object.entries(sample.terms);
  const notes = Object.entries(sample.notes);
  return el(
    "article",
    { class: `sample ${sample.success ? "right" : "wrong"}`, "aria-label": `Sample ${sample.id}` },
    el(
      "header",
      {},
      el("b", {}, `Sample ${sample.id}`),
      el("span", { class: "verdict" }, sample.success ? "✓ right" : "✗ not right"),
      sample.cut ? el("span", { class: "flag cut" }, "truncated") : null,
      el("span", { class: "number" }, `reward ${fmt(sample.reward, 3)}`),
      el("span", { class: "number" }, `advantage ${sample.advantage === null ? "–" : signed(sample.advantage)}`),
    ),
    sample.turns?.length ? dialogOf(sample) : sample.pieces ? tokensOf(sample) : passage(sample.text),
    terms.length ? el("dl", { class: "terms" }, terms.map(([name, value]) => [el("dt", {}, readable(name)), el("dd", {}, fmt(value))])) : null,
    notes.length ? el("details", {}, el("summary", {}, "Notes of the grader"), el("dl", { class: "terms" }, notes.map(([name, value]) => [el("dt", {}, readable(name)), el("dd", {}, passage(value, { class: "note" }))]))) : null,
    el("p", { class: "quiet" }, facts.join(" · ")),
  );
}

// From a point of a curve to the groups of its step, or of the nearest step in the page; of a task, where there are any.
function lookBehind(run, step, task = null) {
  browse.run = run;
  byId("group-run").value = run;
  fillTasks();
  byId("group-task").value = task ?? "";
  if (byId("group-task").selectedIndex < 0) byId("group-task").value = "";
  for (const id of ["step-from", "step-to", "find-text"]) byId(id).value = "";
  byId("group-kind").value = "all";
  findGroups();
  let best = -1;
  browse.found.forEach((group, at) => {
    if (best < 0 || Math.abs(group.step - step) < Math.abs(browse.found[best].step - step)) best = at;
  });
  showGroup(best);
  byId("groups").scrollIntoView({ block: "start" });
  byId("group-list").focus({ preventScroll: true });
}

// The tasks of the run's groups, an entry of a mixture before those within it.
function fillTasks() {
  const chosen = byId("group-task").value;
  const tasks = new Set(RUNS[browse.run].groups.flatMap((group) => (group.task ? [group.task.split("/")[0], group.task] : [])));
  fill(byId("group-task"), el("option", { value: "" }, "all tasks"), [...tasks].sort().map((task) => el("option", { value: task }, readable(task).map((part) => part.textContent ?? part).join(""))));
  byId("group-task").value = tasks.has(chosen) ? chosen : "";
  byId("group-task").parentElement.hidden = !tasks.size;
}

function refilter() {
  const before = browse.group;
  findGroups();
  const at = browse.found.indexOf(before);
  showGroup(at >= 0 ? at : firstWorthALook());
}

// The newest group that says something: with advantages, and with tokens where there are any.
function firstWorthALook() {
  const found = browse.found;
  for (const good of [(group) => !group.zero && hasTokens(group), (group) => !group.zero]) {
    const at = found.findLastIndex(good);
    if (at >= 0) return found.findIndex((group) => group.step === found[at].step && good(group));
  }
  return found.length - 1;
}

function listKey(event) {
  const at = browse.found.indexOf(browse.group);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  if (!(event.key in moves) || !browse.found.length) return;
  event.preventDefault();
  showGroup(Math.max(0, Math.min(browse.found.length - 1, at + moves[event.key])));
}

function turnPage(by) {
  browse.page += by;
  showList();
  byId("group-list").scrollTop = 0;
}

function startGroups() {
  byId("group-run").append(...RUNS.map((run) => el("option", { value: run.index }, `${run.label} · `, readable(run.name).map((part) => part.textContent ?? part).join(""))));
  byId("group-run").addEventListener("change", (event) => ((browse.run = Number(event.target.value)), fillTasks(), refilter()));
  for (const id of ["step-from", "step-to", "find-text"]) byId(id).addEventListener("input", debounced(refilter));
  for (const id of ["group-kind", "group-task"]) byId(id).addEventListener("change", refilter);
  byId("group-tools").addEventListener("submit", (event) => event.preventDefault());
  byId("group-list").addEventListener("keydown", listKey);
  byId("page-back").addEventListener("click", () => turnPage(-1));
  byId("page-on").addEventListener("click", () => turnPage(1));
  browse.run = Math.max(0, RUNS.findIndex((run) => run.groups.length));
  byId("group-run").value = browse.run;
  fillTasks();
  refilter();
}
