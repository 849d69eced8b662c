"""The work that every system is given: one random policy, the same prompts, responses of one fixed length.

Nothing is downloaded. The model is a Qwen2 of 1.3M parameters at a vocabulary of 4096, its tokenizer a byte-level BPE
in which every id from :data:`FIRST_WORD` on is one word, so that a prompt has the same ids in every system, whether
that system is given text or ids. Responses end at their full length and never at EOS.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

PAD, EOS = 0, 1
FIRST_WORD = 258  # after the two special tokens and the 256 bytes
CONTEXT = 2048
KL_COEF, LEARNING_RATE = 0.04, 1e-5
CLIP_NORM = 1e9  # the norm is computed, as in a real run, and never scales: gradients stay comparable
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
REWARD_SOURCE = '''"""A reward that any text earns, without bias and equal in every system."""

import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) / 2**32
'''


@dataclass(frozen=True)
class Case:
    """One amount of work: ``prompts * group`` responses of ``response`` tokens.

    Args:
        name: as in the tables.
        vocab: rows of the embedding, which is the head too.
        prompt: mean tokens of a prompt; lengths are drawn evenly from 0.7 to 1.3 times it.
        group: responses per prompt.
        response: tokens of every response.
        prompts: prompts per step.
    """

    name: str
    vocab: int = 4096
    prompt: int = 100
    group: int = 8
    response: int = 128
    prompts: int = 8

    @property
    def rows(self) -> int:
        """Responses per step.

        >>> Case("base").rows
        64
        """
        return self.prompts * self.group


BASE = Case("base")
LONG = Case("prompt 800", prompt=800)
GROUP = Case("group 32", group=32)
RESPONSE = Case("response 512", response=512)
VOCAB = Case("vocab 152k", vocab=151_936)
BETWEEN = (
    Case("prompt 400", prompt=400),
    Case("group 16", group=16),
    Case("response 256", response=256),
    Case("vocab 32k", vocab=32_768),
)


@dataclass(frozen=True)
class Folder:
    """Where the work of a case lies: the input of each system, and all that crosses to its process.

    Args:
        case: the case.
        path: the folder.
    """

    case: Case
    path: Path

    @property
    def model(self) -> Path:
        """Folder of the policy, loadable by transformers and vLLM."""
        return self.path / "model"

    @property
    def prompts(self) -> Path:
        """``.jsonl`` of ``prompt`` (text) and ``ground_truth``, in the order of use."""
        return self.path / "prompts.jsonl"

    @property
    def heldout(self) -> Path:
        """As :attr:`prompts`, one of them, for systems that require held-out problems."""
        return self.path / "heldout.jsonl"

    @property
    def reward(self) -> Path:
        """Python file with ``compute_score``."""
        return self.path / "reward.py"

    @property
    def rows(self) -> Path:
        """The rows of the learn phase, see :func:`make_rows`."""
        return self.path / "rows.pt"

    def texts(self) -> list[str]:
        """Every prompt."""
        return [json.loads(line)["prompt"] for line in self.prompts.read_text().splitlines()]

    def compute_score(self) -> Callable[..., float]:
        """The reward function of :attr:`reward`."""
        return runpy.run_path(str(self.reward))["compute_score"]

    def load_rows(self) -> dict[str, Any]:
        """See :func:`make_rows`."""
        return torch.load(self.rows, weights_only=True)


def prepare(case: Case, path: Path, *, steps: int = 16, seed: int = 0) -> Folder:
    """Write model, tokenizer, prompts of ``steps`` steps, reward and rows of ``case`` into ``path``."""
    folder = Folder(case, path)
    folder.model.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(case.vocab)
    tokenizer.save_pretrained(folder.model)
    make_model(case.vocab, seed).save_pretrained(folder.model)
    prompts = draw_prompts(case, steps * case.prompts + 1, seed)
    lines = [json.dumps({"prompt": tokenizer.decode(ids).strip(), "ground_truth": "none"}) for ids in prompts]
    folder.prompts.write_text("\n".join(lines[:-1]) + "\n")
    folder.heldout.write_text(lines[-1] + "\n")
    folder.reward.write_text(REWARD_SOURCE)
    torch.save(make_rows(case, prompts[: case.prompts], seed), folder.rows)
    (path / "case.json").write_text(json.dumps(asdict(case)))
    return folder


def make_model(vocab: int, seed: int = 0) -> Any:
    """A random float32 Qwen2 with tied embeddings; the same weights for the same seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **SHAPE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def make_tokenizer(vocab: int) -> Any:
    """Byte-level BPE of exactly ``vocab`` ids; from :data:`FIRST_WORD` on, id and word (a space and letters) are one.

    >>> tokenizer = make_tokenizer(400)
    >>> tokenizer.decode([258, 259, 284]), tokenizer(" a b aa")["input_ids"]
    (' a b aa', [258, 259, 284])
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<|endoftext|>": PAD, "<|im_end|>": EOS}
    entries = special | {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=2)}
    merges: list[tuple[str, str]] = []
    for word in _words(vocab - len(entries)):
        entries[word] = len(entries)
        merges.append((word[:-1], word[-1]))
    core = Tokenizer(models.BPE(vocab=entries, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    # the space before the first word is what makes it a word; nothing else is added to a prompt
    tokenizer.chat_template = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
    return tokenizer


def _words(count: int) -> list[str]:
    """The first ``count`` of ``Ġa .. Ġz, Ġaa, Ġab ..``: each but for its last letter comes before it."""
    measured: list[str] = []
    length = 1
    while len(measured) < count:
        measured += ["Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=length)]
        length += 1
    return measured[:count]


def draw_prompts(case: Case, count: int, seed: int) -> list[list[int]]:
    """``count`` prompts of words, each of its own length between 0.7 and 1.3 times ``case.prompt``."""
    stream = torch.Generator().manual_seed(seed)
    low, high = int(0.7 * case.prompt), int(1.3 * case.prompt)
    lengths = torch.randint(low, high + 1, (count,), generator=stream).tolist()
    return [torch.randint(FIRST_WORD, case.vocab, (length,), generator=stream).tolist() for length in lengths]


def make_rows(case: Case, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """The rows of one learn phase, in plain tensors.

    A random policy is nearly uniform, ``log p = -log V`` give or take 0.2, so noise of 0.15 around that makes ratios on
    both sides of the clip width, and a reference that is near.

    Returns:
        ``prompts``: a list of ids per group; ``responses`` int64 ``[N, R]``; ``old`` and ``ref`` log-probs ``[N, R]``;
        ``advantages`` ``[N]``, of mean 0 in each group.
    """
    stream = torch.Generator().manual_seed(seed + 1)
    shape = (case.rows, case.response)
    uniform = -torch.tensor(float(case.vocab)).log()
    scores = torch.randn((case.prompts, case.group), generator=stream)
    return {
        "prompts": [torch.tensor(ids) for ids in prompts],
        "responses": torch.randint(FIRST_WORD, case.vocab, shape, generator=stream),
        "old": uniform + 0.15 * torch.randn(shape, generator=stream),
        "ref": uniform + 0.15 * torch.randn(shape, generator=stream),
        "advantages": (scores - scores.mean(1, keepdim=True)).flatten(),
    }
