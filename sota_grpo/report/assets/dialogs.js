// A dialog turn by turn: what the policy said, which is trained on, and what others said, which is masked out of the
// loss; each call beside what came of it.

const ENDED = {
  answer: "It ended with an answer.",
  truncated: "It was cut at a length limit.",
  turns: "It ended with a call: no turn was left (env.max_steps).",
  lost: "It ended because its environment was lost.",
};

function dialogOf(sample) {
  let from = 0;
  const turns = [];
  const depths = [];
  sample.turns.forEach((turn, at) => {
    const [first, last] = [from, at === sample.turns.length - 1 ? Infinity : from + turn.tokens];
    from = last;
    const item = turnOf(turn, sample.pieces ? tokensOf(sample, first, last) : passage(turn.text), at ? sample.turns[at - 1] : null, sample.turns[at + 1]);
    depths.push(turn.after === undefined ? (depths[at - 1] ?? 0) : turn.after < 0 ? 0 : depths[turn.after] + 1);
    item.style.marginLeft = `${Math.min(depths[at], 8)}rem`;
    if (turn.after !== undefined) item.querySelector(".who").append(followsOf(turns[turn.after], turn.after));
    turns.push(item);
  });
  const ended = sample.ended ? el("p", { class: "ended" }, ENDED[sample.ended] ?? readable(`It ended: ${sample.ended}.`)) : null;
  return [el("ol", { class: "dialog" }, turns), ended, sample.lost ? passage(sample.lost, { class: "text failed" }) : null];
}

// Where a branch of an agent's requests begins: a button that shows the turn which it follows.
function followsOf(earlier, after) {
  const text = after === -2 ? "another prompt" : after === -1 ? "a branch after the prompt" : `a branch after turn ${after + 1}`;
  if (!earlier) return el("span", { class: "quiet" }, `, ${text}`);
  const button = el("button", { type: "button", class: "branch" }, text);
  button.addEventListener("click", () => {
    earlier.tabIndex = -1;
    earlier.scrollIntoView({ block: "center" });
    earlier.focus();
  });
  return button;
}

function turnOf(turn, words, before, after) {
  const mask = turn.said ? "trained on" : "masked";
  const answers = !turn.said && before?.calls?.some((call) => call.reply !== null);
  const role = turn.role || (turn.said ? "assistant" : "others");
  return el(
    "li",
    { class: `turn ${turn.said ? "said" : "masked"}`, "aria-label": `${role}, ${mask}` },
    el("p", { class: "who" }, el("b", {}, readable(role)), el("span", { class: "quiet" }, `${plural(turn.tokens, "token")}, ${mask}`)),
    answers ? el("details", {}, el("summary", {}, "The answers as the policy read them"), words) : words,
    turn.calls ? turn.calls.map((call) => callOf(call, after && !after.said)) : null,
  );
}

function callOf(call, isRead) {
  const given = Object.entries(call.arguments);
  const came = call.reply === null ? "no answer" : call.error ? "✗ failed" : "✓ answer";
  return el(
    "div",
    { class: `call ${call.reply === null ? "unanswered" : call.error ? "error" : "answered"}` },
    el("div", { class: "asked" }, el("p", {}, el("span", { class: "quiet" }, "call "), el("code", {}, readable(call.name || "(no name)"))), el("dl", { class: "terms" }, given.map(([name, value]) => [el("dt", {}, readable(name)), el("dd", {}, passage(value, { class: "text" }))]))),
    el("div", { class: "came" }, el("p", {}, came, call.reply !== null && !isRead ? el("span", { class: "quiet" }, ", which the policy did not read") : null), call.reply === null ? null : passage(call.reply)),
  );
}

// The prompt as a chat where that is known; the text that the model read has the template's marks, too.
function promptOf(group) {
  const exact = passage(group.prompt, { class: "text prompt" });
  if (!group.turns) return [el("h4", {}, "Prompt"), exact];
  const turns = group.turns.map((turn) => el("li", { class: "turn masked", "aria-label": turn.role }, el("p", { class: "who" }, el("b", {}, readable(turn.role))), passage(turn.text)));
  return [el("h4", {}, "Prompt"), el("ol", { class: "dialog" }, turns), el("details", {}, el("summary", {}, "The prompt as the policy read it"), exact)];
}
