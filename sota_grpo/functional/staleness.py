"""The bound on the number of prompt groups in flight that guarantees the maximum policy age, with its proof."""

from __future__ import annotations


def max_groups_admitted(max_policy_age: int, groups_per_step: int) -> int:
    """Return ``S = (max_policy_age + 1) * groups_per_step``, the most groups in flight, waiting or in training at once.

    With at most S groups admitted, no token is older than ``max_policy_age`` versions when it is trained on. Let
    ``K = groups_per_step`` and ``a = max_policy_age``. The rules of admission:

    1. A group holds one of S slots from the moment its generation is requested.
    2. Step v (v = 0, 1, ...) trains on K groups at version v, publishes version v + 1, and frees the K slots only when
       every engine serves v + 1.
    3. The K groups of a step are the *oldest by admission version*; the step waits for them if they are unfinished.
       Among groups admitted under one version the order is free.
    4. A group that is discarded frees its slot at once (dynamic sampling, a dead engine).

    Claim: a token trained on in step v was sampled by a version ``u' >= v - a``.

    Proof. Take a group admitted under version u and trained on in step v. Just before version u + 1 is published, steps
    0 to u - 1 have freed their u K groups, and all other groups that were admitted and not discarded hold a slot: in
    all at most ``u K + S = (u + a + 1) K``. By rule 3 no group of a later version is trained on before this one, so
    ``v <= u + a``. Its tokens were sampled by versions ``u' >= u`` (rule 2), so ``v - u' <= v - u <= a``. QED

    Rule 2 is needed: slots freed before the step would admit K more groups under version v, and the age reaches a + 1.
    Rule 3 is needed for ``a >= 1``: with first-finished-first-trained one slow group's age grows without limit.
    ``a = 0`` is synchronous. S is the largest possible bound: with one more slot, the last group admitted at version 0
    is trained on at version a + 1.

    Raises:
        ValueError: ``max_policy_age`` is negative or ``groups_per_step`` is below 1.

    >>> max_groups_admitted(max_policy_age=0, groups_per_step=8), max_groups_admitted(2, 8)
    (8, 24)
    """
    if max_policy_age < 0:
        raise ValueError(f"max_policy_age is {max_policy_age}; it must be 0 (synchronous) or more.")
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step is {groups_per_step}; it must be at least 1.")
    return (max_policy_age + 1) * groups_per_step
