"""Checks of the gate that look at data, rewards and masks: would a step be about what was asked and answered?

Each is a function of :class:`~sota_grpo.training.subject.Subject`; the first two need no samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

from sota_grpo import keys
from sota_grpo.envs import PromptSource
from sota_grpo.policy.end_tokens import end_token_ids
from sota_grpo.rewards.grading import own_grader
from sota_grpo.rl.records import Example, SampledText, Score, task_of_example, total_reward
from sota_grpo.rl.table import Row
from sota_grpo.rl.transforms import graded_texts
from sota_grpo.tasks.dataset import normalised
from sota_grpo.training.subject import NUM_SAMPLES, Check, Subject

NUM_LOOKED_AT = 16  # prompts whose responses must all be cut for length before that is a failure
NUM_GRADED = 64  # examples whose gold and empty answers are graded
NUM_GROUPS = 4  # examples for which a grader of groups is given a whole group: each may cost a call of a judge
ENOUGH = 4  # failures of the grader, at texts or at whole groups, after which no more are graded


def gold_answers_earn_the_full_reward(subject: Subject) -> Check:
    """A gold answer is right and earns more than an empty one, for the first training and held-out examples.

    Where the task knows no gold answer, the empty one must be gradable for at least one training example: as a whole
    group where the grader looks at groups, as it will be in training.
    """
    task, num_texts, graded, applies = subject.task, 0, False, False
    known: list[tuple[Example, Score, Score]] = []  # with the scores of the empty and of the gold answer
    errors: list[str] = []
    lost = 0
    for example, siblings in _examples(subject):
        gold = task.gold_response(example)
        texts = [""] * siblings if gold is None else ["", gold]
        env = subject.rollouts.env
        scores = env.grader.scores([(_as_sampled(text, env), example) for text in texts]).result()
        failures = [score.error for score in scores if score.error is not None]
        known += [(example, scores[0], scores[1])] if gold is not None else []
        graded |= len(failures) < len(scores)
        applies |= any(value is not None for score in scores for value in score.terms.values())
        errors += failures
        num_texts += len(scores)
        lost += len(failures) if siblings == 1 else len(failures) == siblings
        if lost >= ENOUGH or (not graded and any("TimeoutError" in failure for failure in failures)):
            break  # each may have cost the grader's whole deadline
    full: dict[str | None, float] = {}  # of each task of a mixture
    rewards = [[total_reward(score.terms, task.term_weights) for score in scores] for _, *scores in known]
    for (example, *_), (_, earned) in zip(known, rewards):
        name = task_of_example(example.extra)
        full[name] = max(full.get(name, -math.inf), earned)
    bad = [
        example
        for (example, _, right), (nothing, earned) in zip(known, rewards)
        if not right.success or earned < full[task_of_example(example.extra)] or nothing >= earned
    ]
    most = ", ".join(f"{full[each]:g}" + ("" if each is None else f" ({each})") for each in full)
    name = "gold answers earn the full reward"
    sentence = f"{len(known) - len(bad)} of {len(known)} gold answers earn the full reward of {most}"
    looked_at = bool(known) or applies
    if not known:
        name = "responses can be graded"
        sentence = "not checked against gold answers, of which the task knows none"
    if bad:
        sentence += f"; the first that does not: {bad[0].query[:80]!r} with answer {bad[0].answer[-40:]!r}"
    if not applies:
        sentence += f"; no reward applies to any of {num_texts} texts, and where that goes on nothing is learned"
    if errors:
        sentence += f"; the grader failed at {len(errors)} of {num_texts} texts, the first: {errors[0]}"
    return Check(name, (not bad and graded) if looked_at or not graded else None, sentence)


def _as_sampled(text: str, env: PromptSource) -> SampledText:
    """With the ids that an engine would have given, and as the grader reads those; of no text, the end alone."""
    ids = env.tokenizer(text, add_special_tokens=False)["input_ids"]
    return SampledText(env.decode(torch.tensor(ids, dtype=torch.int64)), [*ids, end_token_ids(env.tokenizer)[0]])


def _examples(subject: Subject) -> Iterator[tuple[Example, int]]:
    """The examples whose answers are graded, each with the number of its siblings."""
    task = subject.task
    if hasattr(task.score, "score_group") or getattr(task, "is_judged", False):
        count = max(NUM_GROUPS, len(getattr(task, "tasks", ())))  # of a mixture each task once
        yield from ((example, subject.rollouts.env.group_size(example)) for example in task.train[:count])
    else:
        yield from ((example, 1) for example in [*task.train[:NUM_GRADED], *task.heldout[:NUM_GRADED]])


def no_held_out_question_is_trained_on(subject: Subject) -> Check:
    """The normalised questions of the two splits are disjoint."""
    if not subject.task.heldout:
        return Check("no held-out question is trained on", None, "no problem is held out")
    shared = {normalised(e.query) for e in subject.task.heldout} & {normalised(e.query) for e in subject.task.train}
    sentence = f"{len(shared)} held-out questions stand in the training split"
    if shared:
        sentence += f", for example {min(shared)[:80]!r}; take them out of one of the two"
    return Check("no held-out question is trained on", not shared, sentence)


def responses_end_and_are_graded(subject: Subject) -> Check:
    """Some sample ends before its limit; and of each task some sample is graded without an error and earns a term.

    Where all samples were cut, more are drawn before that is a failure.
    """
    rows, faults = subject.rows, []
    ended = int((~rows.get(keys.TRUNCATED)).sum())
    unseen = not ended and subject.max_tokens < subject.sampling.max_tokens
    if not ended and not unseen and not subject.sampling.ignore_eos:
        subject.weight_sync.wake()
        step = subject.learner.settings.optim_batch_size // NUM_SAMPLES  # no more than an optimizer step's responses
        more = subject.sample(min(NUM_LOOKED_AT, step), salt=2)
        subject.weight_sync.sleep()
        if bool(more.get(keys.TRUNCATED).all()):
            faults.append(
                f"all of {len(more)} more were cut, too, so that no response ends: raise inference_model.max_tokens "
                f"(now {subject.sampling.max_tokens}), or name in inference_model.stop what ends a response"
            )
    failed = rows.get(keys.REWARD_ERROR).flatten()
    reasons = [json.loads(text).get("error") for text in rows.get(keys.REWARD_INFO)]
    tasks = [task_of_example(json.loads(row[keys.EXTRA])) for row in rows.rows(keys.EXTRA)]
    for name, places in _places(tasks).items():
        of_task = "" if name is None else f" of {name}"
        if bool(failed[places].all()):
            faults.append(f"the grader failed at every response{of_task}, the first time: {reasons[places[0]]}")
    counts = f"{ended} of {len(rows)} responses end before their limit, {len(rows) - int(failed.sum())} are graded"
    if failed.any() and not faults:
        first = reasons[int(failed.int().argmax())]
        counts += f"; the grader failed at {int(failed.sum())} of {len(rows)}, the first time: {first}"
    if unseen:
        counts += f"; not verified: that longer ones than the {subject.max_tokens} tokens that the checks sample end"
    return Check("responses end and are graded", not faults, "; ".join([counts, *faults]))


def every_sampled_token_is_trained(subject: Subject) -> Check:
    """The trained tokens are those that the policy sampled: the first behind the prompt, and the end token, included.

    In a dialog of several turns every turn ends with an end token, and all begin behind the same token.
    """
    faults = [fault for row in subject.rows.rows() if (fault := _mask_fault(subject, row)) is not None]
    sentence = f"{len(subject.rows) - len(faults)} of {len(subject.rows)} responses are trained from their first token"
    if faults:
        sentence += f" to their end; in the others {faults[0]}"
    return Check("every sampled token is trained", not faults, sentence + ("" if faults else " to their end token"))


def _mask_fault(subject: Subject, row: Row) -> str | None:
    """What is wrong with the trained tokens of a row."""
    env, ids, mask = subject.rollouts.env, row[keys.FULL_TOKENS], row[keys.ASSISTANT_MASK]
    start = len(row[keys.PROMPT_TOKENS])
    outside = torch.zeros(1, dtype=torch.int32)
    edges = torch.diff(mask.int(), prepend=outside, append=outside).nonzero().flatten().tolist()
    turns = list(zip(edges[::2], edges[1::2]))  # from, to
    if not turns or turns[0][0] < start:
        return "a token of the prompt is trained" if turns else "no token is trained"
    if not env.multi_turn and turns[0][0] > start:
        return "the first sampled token is not trained"
    if not env.multi_turn and len(turns) > 1:
        return "a sampled token is not trained"
    if turns[-1][1] < len(ids):
        return "the last sampled token is not trained"
    if getattr(env.tokenizer, "chat_template", None) and len({int(ids[first - 1]) for first, _ in turns}) > 1:
        return "turns begin behind different tokens, so that the first of one is not trained"
    whole = [*turns[:-1], *([] if bool(row[keys.TRUNCATED]) or subject.sampling.ignore_eos else turns[-1:])]
    ends = end_token_ids(env.tokenizer)
    for first, end in whole:
        said = env.tokenizer.decode(ids[first:end]) if subject.stop else ""
        if int(ids[end - 1]) not in ends and not any(stop in said for stop in subject.stop):
            return "the end token is not trained"
    return None


def rewards_and_advantages_belong_to_their_responses(subject: Subject) -> Check:
    """Every sample, graded once more, earns the reward of its row; and of two siblings the better has more advantage.

    A grader of groups is given the whole group. A response that earns another reward each time shows nothing, and a
    judge is not asked again. Advantages are computed of made-up rewards, as those of the samples may all be equal.
    """
    rows, name = subject.rows, "rewards and advantages belong to their responses"
    wrong, steady = _regraded(subject)
    swapped, compared = _swapped_advantages(subject)
    sentence = f"{steady - len(wrong)} of {steady} responses earn the reward of their row when they are graded again"
    if wrong:
        place, again = wrong[0]
        sentence += f"; response {place} of {len(rows)} has {float(rows.get(keys.REWARD)[place]):g} and earns {again:g}"
    sentence += f"; in {compared - swapped} of {compared} groups the better response has the larger advantage"
    return Check(name, (not wrong and not swapped) if steady or compared else None, sentence)


def _regraded(subject: Subject) -> tuple[list[tuple[int, float]], int]:
    """The places of rows that earn another reward when they are graded again, with that; how many could be compared."""
    rows, groups = subject.rows.rows(), list(_places(subject.rows.get(keys.GROUP_ID).tolist()).values())

    def pair(row: Row) -> tuple[SampledText, Example]:
        ((text, example),) = graded_texts([row])
        last = int((~row[keys.ASSISTANT_MASK]).nonzero()[-1]) + 1
        record = row.get(keys.DIALOG)
        return SampledText(text, row[keys.FULL_TOKENS][last:].tolist(), record and json.loads(record)), example

    failed = subject.rows.get(keys.REWARD_ERROR).flatten().tolist()
    asked = groups if hasattr(subject.task.score, "score_group") else [[place] for group in groups for place in group]
    first: dict[int, float] = {}
    second: dict[int, float] = {}
    for rewards in (first, second):
        odd = {place for place, value in first.items() if not _equal(value, float(rows[place][keys.REWARD]))}
        graded = [group for group in asked if rewards is first or odd & {*group}]
        futures = [own_grader(subject.rollouts.env.grader).scores([pair(rows[p]) for p in group]) for group in graded]
        for group, future in zip(graded, futures):
            for place, score in zip(group, future.result(), strict=True):
                if score.error is None and not failed[place]:
                    rewards[place] = _earned(subject, rows[place], score)
    unsteady = {place for place, value in second.items() if place in first and not _equal(value, first[place])}
    wrong = [(place, value) for place, value in second.items() if place in odd and place not in unsteady]
    return wrong, len(first) - len(unsteady)


def _earned(subject: Subject, row: Row, score: Score) -> float:
    """The reward of a row under another score: what graders do not say (a judge's terms, penalties) is the row's."""
    own = {key[-1]: float(value) for key, value in row.items() if key[:-1] == keys.REWARD_TERMS}
    return total_reward({**own, **score.terms}, {**dict.fromkeys(own, 1.0), **subject.rollouts.env.task.term_weights})


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)  # rewards are kept in float32


def _places(names: Iterable[Hashable]) -> dict[Any, list[int]]:
    """The positions of each name."""
    places: dict[Any, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return places


def _swapped_advantages(subject: Subject) -> tuple[int, int]:
    """In how many groups the better response has not the larger advantage, under made-up rewards; of how many.

    Rewards are 1, 0, 0, 1, 1, 0, ... so that advantages of the next response or the next group show.
    """
    rows = subject.rows.without(keys.ADVANTAGE, keys.GRADED_REWARD)
    groups = list(_places(rows.get(keys.GROUP_ID).tolist()).values())
    better = torch.zeros(len(rows))
    for number, group in enumerate(groups):
        better[group[number % 2 :: 2]] = 1.0
    rows.set(keys.REWARD, better.reshape(-1, 1))
    rows.set(keys.REWARD_ERROR, torch.zeros(len(rows), 1, dtype=torch.bool))
    weights = subject.rollouts.env.task.term_weights
    for name in {*weights, *rows.names(keys.REWARD_TERMS)}:
        rows.set((*keys.REWARD_TERMS, name), better.reshape(-1, 1) * (1 if weights.get(name, 1) > 0 else -1))
    for transform in subject.transforms:
        rows = transform(rows)
    if not rows.has(keys.ADVANTAGE):
        return 0, 0
    advantage = rows.get(keys.ADVANTAGE).flatten()
    swapped = [
        group
        for group in groups
        if not advantage[[p for p in group if better[p]]].min() > advantage[[p for p in group if not better[p]]].max()
    ]
    return len(swapped), len(groups)
