"""What is wrong with the options of a judge (``reward.judge``), in sentences; the file of its rubric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from sota_grpo.config import Config, JudgeConfig, reward_names
from sota_grpo.config.spelling import changed_options
from sota_grpo.rewards.judge import CHAT
from sota_grpo.text import one_line


def rubric_file(rubric: str | None) -> Path | None:
    """The file that ``reward.judge.rubric`` names; None where it is the text itself.

    >>> rubric_file("rubric.md"), rubric_file("Is it polite?"), rubric_file("Be brief.\\nSee notes.txt")
    (PosixPath('rubric.md'), None, None)
    """
    is_file = rubric is not None and "\n" not in rubric and rubric.endswith((".md", ".txt"))
    return Path(rubric) if rubric is not None and is_file else None


def a_judge_is_asked_for_what_it_can_do(config: Config) -> Iterator[str]:
    judge: JudgeConfig = config.reward.judge
    if judge.kind is None:
        for name, (value, default) in changed_options(config).items():
            if name.startswith("reward.judge."):
                left = "null" if default is None else default
                yield f"{name}={value} belongs to a judge; give reward.judge.kind, or leave it at {left}."
        return
    for option in ("rubric", "reference") if judge.kind != CHAT else ():
        if value := getattr(judge, option):
            yield f"reward.judge.{option}={value} has no effect on reward.judge.kind={judge.kind}; leave it out."
    if judge.url is None:
        yield f"reward.judge.kind={judge.kind} needs a server; give reward.judge.url=http://HOST:PORT."
    else:
        yield from _url_faults(judge.url)
    if judge.weight == 0 and config.env.mixture is None:
        yield "reward.judge.weight=0 asks the judge for nothing; leave reward.judge.kind out."
    if judge.alone and config.env.reasoning:
        yield "reward.judge.alone=true has no rule for thinking again (env.reasoning); use one of them."
    if judge.alone and config.reward.path is not None and config.env.mixture is None:
        yield (
            f"reward.judge.alone=true leaves no place for the functions {', '.join(map(str, reward_names(config)))} of "
            "reward.path; leave one of them out."
        )


def _url_faults(url: str) -> Iterator[str]:
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        yield f"reward.judge.url={one_line(url)} is no address ({error}); write http://HOST:PORT."
        return
    if address.scheme not in ("http", "https") or not host:
        yield f"reward.judge.url={one_line(url)} is no address of a server; write http://HOST:PORT."
    if address.username is not None or address.password is not None or address.query:
        yield (
            "reward.judge.url has a user name, a password or a query in it, which the run would save; the key of a "
            "judge is the environment variable SOTA_GRPO_JUDGE_KEY."
        )
