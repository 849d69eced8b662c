"""A learned judge in the reward workers: a sequence classifier of transformers, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rewards.judge import Judged
from sota_grpo.rewards.judge.questions import data, dialog, judged_text
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Scorer, Task, prepare
from sota_grpo.text import first_line

_ROWS = 8  # responses in one forward pass


class ClassifierScorer:
    """The scores of ``score``, with what a classifier gives the response as one term more.

    Of a model with one label it is the number itself (reward models of that kind are trained on differences, which
    groups keep), of several the probability of one of them. Prompt and response are given by the chat template of the
    model's tokenizer, or as a pair of texts where it has none; names of special tokens in them are text.

    Args:
        score: of the task's own terms.
        task: of the responses, for their prompts; without examples.
        path: folder of the model, or its name on the hub; loaded where this is used, from safetensors.
        judged: what of the task is judged.
        label: which of several.

    Raises:
        UserError: no such model, or no classifier, when it is first asked or prepared.
    """

    def __init__(self, score: Scorer, task: Task, path: str, judged: Judged, *, label: int) -> None:
        self._score, self._task, self._path, self._judged, self._label = score, task, path, judged, label

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_model"}

    def __call__(self, response: str, example: Example) -> Score:
        return self.score_group([(response, example)])[0]

    def prepare(self) -> None:
        """Load the model; what the task's own scorer does before its first response."""
        prepare(self._score)
        _ = self._model

    def score_group(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        """Of the siblings of one prompt."""
        scores = guarded_scores(self._score, self._judged.own_weights, pairs)
        judged = [index for index, (_, example) in enumerate(pairs) if self._judged.of(example) is not None]
        values = self.values([pairs[index] for index in judged])
        value_of = dict(zip(judged, values, strict=True))
        return [
            score if score.error is not None else self._judged.joined(score, example, value_of.get(index))
            for index, (score, (_, example)) in enumerate(zip(scores, pairs, strict=True))
        ]

    def values(self, pairs: Sequence[tuple[str, Example]]) -> list[float]:
        """What the classifier gives each response, ``[N]``."""
        import torch

        tokenizer, model = self._model
        scores: list[float] = []
        for at in range(0, len(pairs), _ROWS):
            texts = [self._texts(tokenizer, *pair) for pair in pairs[at : at + _ROWS]]
            limit = getattr(model.config, "max_position_embeddings", None)
            options: dict[str, Any] = {"padding": True, "truncation": limit is not None, "max_length": limit}
            firsts, seconds = [text for text, _ in texts], [text for _, text in texts]
            is_pair = seconds[0] is not None
            options |= {"text_pair": seconds} if is_pair else {"add_special_tokens": False}
            with torch.inference_mode():
                logits = model(**tokenizer(firsts, return_tensors="pt", **options)).logits.float()
            values = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, self._label]
            scores += values.tolist()
        return scores

    def _texts(self, tokenizer: Any, response: str, example: Example) -> tuple[str, str | None]:
        """The whole dialog as one text, or prompt and response."""
        names = tokenizer.all_special_tokens
        turns = [{**turn, "content": data(turn["content"], names)} for turn in self._task.messages(example)]
        said = data(judged_text(response), names)
        if not tokenizer.chat_template:
            return dialog(turns), said
        turns.append({"role": "assistant", "content": said})
        return tokenizer.apply_chat_template(turns, tokenize=False), None

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                self._path, use_safetensors=True, trust_remote_code=False
            ).eval()
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"reward.judge.model={self._path} cannot be loaded: {first_line(error)}.") from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        if not -model.config.num_labels <= self._label < model.config.num_labels:
            count = model.config.num_labels
            raise UserError(f"reward.judge.label={self._label}, and its model has {count} labels.")
        return tokenizer, model
