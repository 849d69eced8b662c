"""The bound on policy age, and why admission by slots keeps it."""

from __future__ import annotations


def max_groups_admitted(max_policy_age: int, groups_per_step: int) -> int:
    """Return ``S = (max_policy_age + 1) * groups_per_step``, the most groups in flight or waiting at once.

    Let ``K = groups_per_step`` and ``a = max_policy_age``. The rules of admission:

    1. A group holds one of S slots from the moment its generation is requested.
    2. Step v (v = 0, 1, ...) trains on K groups while the version is v, publishes version v + 1, and only when every
       engine serves v + 1 frees those K slots.
    3. The K groups of a step are the *oldest by admission version*; the step waits for them if they are unfinished.
       Among groups admitted under one version the order is free.
    4. A group that is discarded frees its slot at once (dynamic sampling, a dead engine).

    Claim: a token trained on in step v was sampled by a version ``u' >= v - a``.

    Proof. Take a group admitted under version u and trained on in step v. When the version leaves u for u + 1, the
    groups ever admitted and not discarded are the u K already trained on and freed, and those that hold a slot: at most
    ``u K + S = (u + a + 1) K``. By rule 3 nothing admitted later overtakes it, so it is trained on in step
    ``v <= u + a``. Its tokens were sampled by versions ``u' >= u`` (rule 2), so ``v - u' <= v - u <= a``. QED

    Rule 2 is needed: slots freed when the batch is *taken* admit K more groups under version v: the age reaches a + 1.
    Rule 3 is needed for ``a >= 1``: with first-finished-first-trained one slow group's age grows without limit. ``a =
    0``
    is synchronous: every step takes all K slots. S is the largest bound that works: with one slot more, the last group
    admitted at version 0 is trained on at a + 1.

    Raises:
        ValueError: the age is negative or a step has no group.

    >>> max_groups_admitted(max_policy_age=0, groups_per_step=8), max_groups_admitted(2, 8)
    (8, 24)
    """
    if max_policy_age < 0:
        raise ValueError(f"max_policy_age is {max_policy_age}; 0 is synchronous, the smallest age there is.")
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}; a step needs at least 1 group.")
    return (max_policy_age + 1) * groups_per_step
