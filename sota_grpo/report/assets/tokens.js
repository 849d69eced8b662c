// A response token by token: shaded by what is known of each, with the number in words under the pointer or the focus.

// `bounds` separate the shades 0 to 4; `amount` is what is compared with them.
const MEASURES = {
  none: { title: "nothing" },
  entropy: { title: "entropy", bounds: [0.1, 0.5, 1, 2], says: "nats; the trainer's next-token distribution" },
  ratio: { title: "ratio", bounds: [0.02, 0.1, 0.2, 0.5], amount: Math.log, says: "trainer over engine, before the step; shaded by its logarithm" },
  kl: { title: "KL", bounds: [0.001, 0.01, 0.1, 1], says: "to the reference, nats" },
  advantage: { title: "advantage", bounds: [0.1, 0.5, 1, 2], says: "one number for the whole response" },
};
const shading = { measure: "entropy", numbers: false };

const wrote = (sample, at) => !sample.said || sample.said[at] === 1;

function valueOf(sample, measure, at) {
  if (!wrote(sample, at)) return null;
  if (measure === "advantage") return sample.advantage;
  return sample[measure]?.[at] ?? null;
}

function shadeOf(measure, value) {
  const { bounds, amount } = MEASURES[measure];
  if (!bounds || value === null) return "";
  const size = amount ? amount(value) : value;
  const level = bounds.filter((bound) => Math.abs(size) >= bound).length;
  return level ? `${size < 0 ? "minus" : "plus"} shade${level}` : "";
}

function wordsOf(sample, at) {
  const place = `token ${fmt(at + 1 + (sample.gap && at >= sample.gap[0] ? sample.gap[1] : 0))}`;
  if (!wrote(sample, at)) return `${place}, not written by the policy`;
  const known = ["entropy", "ratio", "kl"].filter((measure) => sample[measure]);
  const said = known.map((measure) => `${MEASURES[measure].title} ${fmt(valueOf(sample, measure, at), 3)}`);
  return [place, ...said, `advantage ${signed(sample.advantage)}`].join(" · ");
}

function tokenSpan(sample, at) {
  const value = valueOf(sample, shading.measure, at);
  const shade = shadeOf(shading.measure, value);
  const number = shading.numbers && value !== null && shading.measure !== "none" ? value.toFixed(shading.measure === "kl" ? 3 : 2) : null;
  const line = sample.pieces[at].includes("\n") ? " line" : "";
  const other = wrote(sample, at) ? "" : " inserted";
  return el("span", { class: `token ${shade}${line}${other}`, "data-at": at, "data-number": number }, readable(sample.pieces[at]));
}

// The tokens are one stop of the Tab key; arrow keys move inside. Of a dialog those of one turn: numbers `from` to `to`
// of the response, of which a gap is not in the page.
function tokensOf(sample, from = 0, to = Infinity) {
  const [first, left] = sample.gap ?? [sample.pieces.length, 0];
  const isIn = (at) => from <= at && at < to;
  const kept = [...sample.pieces.keys()].filter((at) => isIn(at < first ? at : at + left));
  const spans = kept.map((at) => tokenSpan(sample, at));
  const hidden = Math.min(to, first + left) - Math.max(from, first);
  const nodes = [...spans];
  if (hidden > 0) nodes.splice(kept.filter((at) => at < first).length, 0, leftOut(hidden, "token"));
  const text = el("div", { class: "text tokens", dir: "auto", tabindex: "0", role: "group", "aria-label": `Tokens of sample ${sample.id}; arrow keys read their numbers` }, nodes);
  let at = -1;
  const show = (next) => {
    spans[at]?.classList.remove("here");
    at = Math.max(0, Math.min(spans.length - 1, next));
    spans[at].classList.add("here");
    spans[at].scrollIntoView({ block: "nearest" });
    showTip(spans[at], wordsOf(sample, kept[at]));
  };
  text.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (event.key === "Escape") hideTip();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(at + moves[event.key]);
  });
  text.addEventListener("blur", () => (spans[at]?.classList.remove("here"), hideTip()));
  text.addEventListener("mouseover", (event) => {
    const span = event.target.closest(".token");
    if (span) showTip(span, wordsOf(sample, Number(span.dataset.at)));
  });
  text.addEventListener("mouseleave", hideTip);
  return text;
}

function showTip(over, words) {
  const tip = byId("tip");
  tip.textContent = words;
  tip.hidden = false;
  const place = over.getClientRects()[0] ?? over.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
  const above = place.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 0 ? above : place.bottom + 6}px`;
}

const hideTip = () => (byId("tip").hidden = true);

// The scale in use, each shade with its bounds written on it.
function scaleOf() {
  const { bounds, says, amount } = MEASURES[shading.measure];
  if (!bounds) return null;
  const edge = (bound, sign) => fmt(amount ? Math.exp(sign * bound) : sign * bound, 3);
  const cell = (level, sign) => el("span", { class: `token ${sign < 0 ? "minus" : "plus"} shade${level}` }, `${sign < 0 ? "≤" : "≥"} ${edge(bounds[level - 1], sign)}`);
  const levels = [1, 2, 3, 4];
  const minus = shading.measure === "entropy" ? [] : [...levels].reverse().map((level) => cell(level, -1));
  return el("p", { class: "scale" }, minus, levels.map((level) => cell(level, 1)), el("span", { class: "quiet" }, ` ${MEASURES[shading.measure].title}: ${says}`));
}
