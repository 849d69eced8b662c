// Replays under other algorithms; then time, policy age, gate and config, each a table of the runs side by side.

function bar(share, words) {
  const inside = el("span", { class: "bar" });
  inside.style.width = `${Math.min(100, 100 * share)}%`;
  return el("td", { class: "barred" }, words, inside);
}

function wide(label, ...children) {
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, children);
}

const runHeads = () => RUNS.map((run) => el("th", {}, badge(run)));

function startReplays() {
  const cellOf = (text) => el("td", { class: "figure" }, readable(text));
  const tableOf = ([head, ...rows]) => table(head.map(readable), rows.map(([name, ...cells]) => [rowHead(readable(name)), ...cells.map(cellOf)]), { class: "figures" });
  const shown = RUNS.flatMap((run) => run.replays.map((replay) => ({ run, ...replay })));
  const details = shown.map(({ run, title, tables, notes }, index) =>
    el(
      "details",
      { class: "replay", open: index === 0 },
      el("summary", {}, RUNS.length > 1 ? [badge(run), " "] : null, readable(title)),
      tables.map((each) => wide(title, tableOf(each))),
      notes.map((note) => el("p", {}, readable(note))),
    ),
  );
  const none = el("p", { class: "quiet" }, "None yet: ", el("code", {}, "sota-grpo replay RUN --step N algorithm=grpo,dapo,gspo"), " computes a stored step under several algorithms, and the tables are shown here.");
  byId("replays-list").append(...(details.length ? details : [none]));
}

function startTime() {
  const names = new Set(RUNS.flatMap((run) => Object.keys(run.phases.parts)));
  const row = (title, seconds) => [rowHead(title), ...RUNS.map((run) => cell(run, seconds(run)))];
  const cell = (run, spent) => (spent === undefined || !run.phases.total ? el("td", {}, "–") : bar(spent / run.phases.total, `${duration(spent)} · ${percent(spent / run.phases.total)}`));
  const rows = [...names].map((name) => row(name, (run) => run.phases.parts[name]));
  rows.push(row("other", (run) => run.phases.other));
  rows.push([rowHead("steps and evaluations"), ...RUNS.map((run) => el("td", { class: "sum" }, duration(run.phases.total)))]);
  const note = RUNS.some((run) => run.concurrent) ? "In a concurrent run the phases overlap, so they may add up to more than the whole." : "";
  byId("time-table").append(wide("Time by phase", table(["Phase", ...runHeads()], rows, { class: "bars" })), el("p", { class: "quiet" }, `Checkpoints, the start and the checks before training are not in these sums. ${note}`));
}

function startAge() {
  const ages = [...new Set(RUNS.flatMap((run) => run.record.ages.map(([age]) => age)))].sort((a, b) => a - b);
  if (!ages.length) return byId("age-table").append(el("p", { class: "quiet" }, "No responses are recorded."));
  const counts = RUNS.map((run) => new Map(run.record.ages));
  const totals = counts.map((count) => [...count.values()].reduce((sum, one) => sum + one, 0));
  const rows = ages.map((age) => [
    rowHead(plural(age, "version")),
    ...RUNS.map((run, at) => (counts[at].has(age) ? bar(counts[at].get(age) / totals[at], `${plural(counts[at].get(age), "response")} · ${percent(counts[at].get(age) / totals[at])}`) : el("td", {}, "–"))),
  ]);
  return byId("age-table").append(
    wide("Policy age", table(["Age", ...runHeads()], rows, { class: "bars" })),
    el("p", { class: "quiet" }, "Published versions between the oldest token of a response and the step that trained on it; of the best and the worst response of each group, over the whole run."),
  );
}

function startGate() {
  const without = RUNS.filter((run) => !run.gate);
  for (const run of RUNS.filter((run) => run.gate)) {
    const title = RUNS.length > 1 ? el("h3", {}, badge(run), " ", readable(run.name)) : null;
    const made = run.gate.checks.filter((check) => check.passed !== null);
    const passed = made.filter((check) => check.passed).length;
    const outcome = (check) => check.passed === null ? ["", "– not made"] : check.passed ? ["passed", "✓ passed"] : ["failed", "✗ FAILED"];
    const rows = run.gate.checks.map((check) => [
      el("td", { class: outcome(check)[0] }, outcome(check)[1]),
      rowHead(readable(check.name)),
      el("td", {}, readable(check.sentence)),
      el("td", { class: "nowrap" }, Number.isFinite(Number(check.seconds)) ? duration(Number(check.seconds)) : "–"),
    ]);
    const said = rows.length ? `check.mode=${run.gate.mode}: ${passed} of ${made.length} passed, before the first step of the last start.` : `check.mode=${run.gate.mode}: no checks were made.`;
    byId("gate-table").append(...[title, el("p", {}, readable(said)), rows.length ? wide("Checks", table(["Result", "Check", "What was measured", "Time"], rows)) : null].filter(Boolean));
  }
  const whose = RUNS.length === 1 ? "this run" : without.map((run) => run.label).join(", ");
  if (without.length) byId("gate-table").append(el("p", { class: "quiet" }, `No checks are recorded of ${whose}.`));
}

function showConfig() {
  const kind = byId("config-kind").value;
  const wanted = byId("find-option").value.toLowerCase();
  const changed = (option) => option.values.some((value) => value !== null && value !== option.default);
  const kept = DATA.options.filter(
    (option) => (kind === "all" || (kind === "differs" ? option.differs : changed(option))) && `${option.name} ${option.help}`.toLowerCase().includes(wanted),
  );
  const rows = kept.map((option) => [
    rowHead(readable(option.name), option.help ? el("span", { class: "quiet help" }, readable(option.help)) : null),
    ...option.values.map((value) => el("td", { class: value !== null && value !== option.default ? "changed" : null }, value === null ? "–" : readable(value))),
    el("td", { class: "quiet" }, option.default === null ? "not in the schema" : readable(option.default)),
  ]);
  const heads = RUNS.length > 1 ? runHeads() : ["Value"];
  const none = DATA.options.length ? "No option matches." : "These runs have no config.yaml.";
  fill(byId("config-table"), rows.length ? table(["Option", ...heads, "Default"], rows, { class: "options" }) : el("p", { class: "quiet" }, none));
}

function startConfig() {
  byId("config-kind").value = RUNS.length > 1 ? "differs" : "changed";
  if (RUNS.length === 1) byId("config-kind").querySelector("[value=differs]").remove();
  byId("config-kind").addEventListener("change", showConfig);
  byId("find-option").addEventListener("input", showConfig);
  byId("config-tools").addEventListener("submit", (event) => event.preventDefault());
  showConfig();
}
