// Data, elements, numbers and texts. Whatever a model or a file wrote becomes a text node, never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs.map((run, index) => ({ ...run, index, label: labelOf(index) }));
const SEEDED = DATA.seeds.filter((members) => members.length > 1);
const state = {
  shown: new Set(RUNS.map((run) => run.index)),
  half: 0, // steps on either side that smoothing takes in
  axis: "steps",
  bands: true,
  means: false,
  log: false,
};

function labelOf(index) {
  return (index >= 26 ? labelOf(Math.floor(index / 26) - 1) : "") + String.fromCharCode(65 + (index % 26));
}

const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function fill(target, ...children) {
  target.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

function fmt(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1e12 ? value.toLocaleString("en-GB") : value.toExponential(2);
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

const signed = (value) => (value > 0 ? "+" : "") + fmt(value);
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const plural = (count, noun) => `${fmt(count)} ${noun}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return seconds > 0 && seconds < 0.01 ? "< 0.01 s" : `${fmt(seconds, 3)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  const rest = String(whole % 60).padStart(2, "0");
  if (minutes < 60) return `${minutes} min ${rest} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// Characters that have no picture but turn or hide what stands around them: each is shown by its number.
const ODD =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2060-\u206f\ufeff\ufff9-\ufffb]|\p{Cs}|[\u{e0000}-\u{e007f}]/gu;

function readable(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(ODD)) {
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(text.slice(from, found.index), el("span", { class: "odd", title: "a character without a picture" }, `U+${code}`));
    from = found.index + found[0].length;
  }
  nodes.push(text.slice(from));
  return nodes;
}

const leftOut = (count, noun) => el("span", { class: "gap" }, ` … ${plural(count, noun)} left out … `);

// A text as it came from the run, of a very long one its two ends.
function passage(text, attributes = {}) {
  const whole = typeof text === "string";
  const parts = whole ? readable(text) : [readable(text.head), leftOut(text.left, "character"), readable(text.tail)];
  return el("div", { class: "text", dir: "auto", ...attributes }, parts);
}

const plainText = (text) => (typeof text === "string" ? text : text.head + text.tail);

function table(head, rows, attributes = {}) {
  const cells = (row, tag) => row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el(tag, {}, cell)));
  return el(
    "table",
    attributes,
    el("thead", {}, el("tr", {}, cells(head, "th").map((cell) => (cell.setAttribute("scope", "col"), cell)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells(row, "td")))),
  );
}

const rowHead = (...children) => el("th", { scope: "row" }, ...children);

function debounced(work, wait = 150) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}
