"""The trainer's policy: a transformers causal language model that returns log-probabilities, never logits.

Also the tokens that end its responses (:func:`end_token_ids`), and the references of its KL term.

Its decoder computes packed rows if a test shows that this changes results by rounding only. On CUDA its layers can be
compiled (:func:`fuse_layers`), so that norms, rotary positions, gated activations and residuals become few kernels.
Attention is compiled only with CUDA's kernel for half precision: other attention reads the packed layout, which differs
in every micro-batch.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sota_grpo import keys
from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import SupportSets, VocabShard, chunked_log_probs, support_log_probs
from sota_grpo.policy import decoder_layer
from sota_grpo.policy.model_sizes import rotary_limit
from sota_grpo.policy.shared_prompt import (
    LAYER_TYPES,
    SHARED_ATTENTION,
    Layout,
    branch_rows,
    is_right_padded,
    pack,
    shared_attention,
    takes_kernels,
)
from sota_grpo.text import sentence

logger = logging.getLogger(__name__)

KERNEL_DEVICES = ("cuda",)  # device types with attention kernels, which read ``Layout.tables``
ENTROPY = "entropy"
_PLAIN = "plaintext"  # letters that no template changes
#: Model families whose packed rows are tested to equal padded rows: if one of them is padded, something is wrong.
KNOWN_TO_PACK = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text")


class CausalPolicy(TensorDictModuleBase):
    """TensorDict module that computes log-probability and entropy of every assistant token under the sampling settings.

    ``log_probs[n, t] = log softmax(logits[n, t - 1] / temperature)[tokens[n, t]]`` where the assistant mask is True,
    and 0 elsewhere. ``t - 1`` is the token before ``t``: padding is skipped, wherever it is, and in a row that is a
    tree ``keys.PARENTS`` names it. Rows are packed, so that rows with the same prompt compute it once
    (:mod:`sota_grpo.policy.shared_prompt`). If the model's attention does not allow that, no row is packed and a
    warning gives the reason. The LM head runs only at positions that predict an
    assistant token, so no ``[N, T, V]`` tensor exists. Softmax and log are float32 (float64 for a float64 model);
    autocast is left to the caller. If sampling was truncated (``keys.SUPPORT_IDS``), softmax and entropy are over the
    sampling support (:mod:`sota_grpo.functional.log_probs`). UserError if the head is more than a linear layer
    with a softcap or a scale.

    Args:
        model: a transformers causal language model, with or without LoRA; its attention and layers are changed in
            place.
        temperature: sampling temperature, by which logits are divided; ValueError unless above 0.
        with_entropy: also write ``"entropy"``.
        entropy_grad: compute gradients of the entropy, as an entropy bonus needs.
        shared_prompt: False: no row is packed, and the model's attention changes only if SDPA would ignore a softcap.
        fused: compile the decoder's layers (:func:`fuse_layers`) if rows are packed.

    Example (2 rows, prompts of 2 and 1 tokens; 0 where the assistant mask is False):

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    >>> rows = TensorDict({
    ...     keys.FULL_TOKENS: torch.tensor([[5, 6, 7, 1], [5, 8, 1, 0]]),
    ...     keys.ATTENTION_MASK: torch.tensor([[True, True, True, True], [True, True, True, False]]),
    ...     keys.ASSISTANT_MASK: torch.tensor([[False, False, True, True], [False, True, True, False]]),
    ... }, batch_size=[2])
    >>> out = CausalPolicy(model)(rows)
    >>> (out[keys.LOG_PROBS] < 0).int().tolist()
    [[0, 0, 1, 1], [0, 1, 1, 0]]
    """

    copies_rows = True  # so that the loss does not

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        entropy_grad: bool = False,
        shared_prompt: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; log-probabilities need a temperature above 0")
        self.in_keys = [keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK]
        self.out_keys = [keys.LOG_PROBS, ENTROPY] if with_entropy else [keys.LOG_PROBS]
        self.scorer = Scorer(model, temperature, with_entropy, entropy_grad)
        base, self.fused = base_model(model), fused
        self._longest = rotary_limit(base.config.get_text_config())
        #: Whether right-padded rows are packed, so that equal prompts are computed once.
        self.shared_prompt = shared_prompt and takes_packed_rows(base, use_shared_attention(base))
        text: Any = base.config.get_text_config()
        if getattr(text, "attn_logit_softcapping", None) and text._attn_implementation == "sdpa":
            base.set_attn_implementation(SHARED_ATTENTION)  # padded rows too: transformers' SDPA leaves out the cap
        if fused and self.shared_prompt:
            fuse_layers(base)

    @property
    def model(self) -> nn.Module:
        """The causal language model, with or without LoRA."""
        return self.scorer.model

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a shallow copy of the padded rows ``[N, T]`` with the out-keys set; errors as in :meth:`log_probs`.

        ``tensordict`` itself keeps its ``log_probs``, the behaviour policy's. A layout in ``keys.LAYOUT`` is used.
        """
        log_probs, entropy = self.log_probs(tensordict, tensordict.get_non_tensor(keys.LAYOUT, default=None))
        out = tensordict.copy()
        out.set(keys.LOG_PROBS, log_probs)
        if entropy is not None:
            out.set(ENTROPY, entropy)
        return out

    def log_probs(self, rows: TensorDictBase, layout: Layout | None = None) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies (None unless ``with_entropy``) as ``[N, T]`` on the model's device.

        Both are float32 (float64 for a float64 model), and 0 where the assistant mask is False. ``layout``: result of
        :meth:`layout`; None: it is computed here. KeyError: the rows lack an entry. ValueError: a row's first token is
        an assistant token, padding is one or precedes a token of a tree, sampling supports do not match the tokens, or
        a row is longer than :func:`~sota_grpo.policy.model_sizes.rotary_limit`.
        """
        head: Any = base_model(self.model).get_output_embeddings()
        device = head.weight.device
        longest = int(rows[self.in_keys[1]].sum(1).max()) if self._longest else 0
        if self._longest and longest > self._longest:
            raise ValueError(
                f"a row has {longest} tokens, and above {self._longest} the rotary positions of "
                f"{type(base_model(self.model)).__name__} change with the longest row of a batch; use shorter rows"
            )
        layout = layout or self.layout(rows)
        if layout is not None:
            return self.scorer(layout.to(device))
        tokens, attention_mask, assistant_mask = (rows[key] for key in self.in_keys)
        if not is_right_padded(attention_mask.bool()):
            return self._of_moved(rows, device)
        support = None if rows.get(keys.SUPPORT_IDS, None) is None else _support_sets(rows).to(device)
        padded = [tokens, assistant_mask.bool()]
        if (parents := rows.get(keys.PARENTS, None)) is not None:
            padded += branch_rows(*(each.cpu() for each in (tokens, attention_mask, assistant_mask, parents)))
        return self.scorer(None, *(each.to(device) for each in padded), support=support)

    def _of_moved(self, rows: TensorDictBase, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return :meth:`log_probs` of rows in which padding precedes a token, computed with it at the end."""
        if rows.get(keys.PARENTS, None) is not None:
            raise ValueError("padding precedes a token of a row that is a tree; move it to the end of the row")
        order = rows[self.in_keys[1]].int().argsort(dim=-1, descending=True, stable=True)
        there = {key: rows.get(key, None) for key in (*self.in_keys, keys.SUPPORT_COUNTS)}
        moved = {key: value.gather(1, order) for key, value in there.items() if value is not None}
        moved |= {} if (ids := rows.get(keys.SUPPORT_IDS, None)) is None else {keys.SUPPORT_IDS: ids}
        log_probs, entropy = self.log_probs(TensorDict(moved, batch_size=rows.batch_size))
        order = order.to(device)
        entropy = None if entropy is None else entropy.scatter(1, order, entropy)
        return log_probs.scatter(1, order, log_probs), entropy

    def half_weights(self, dtype: torch.dtype, summed: bool = True) -> AbstractContextManager[None]:
        """Return a context in which joined layers and head cast matrices to ``dtype`` once; no-op if none is joined.

        In the context, weights must not change and gradients must not be reset (:class:`.decoder_layer.HalfWeights`).
        """
        base: Any = base_model(self.model)
        joined = [layer for layer in decoder_layers(base) if hasattr(layer, "joined")]
        head = (self.scorer, base.get_output_embeddings().weight)
        return decoder_layer.HalfWeights(joined, dtype, summed, *head) if joined else nullcontext()

    def layout(self, rows: TensorDictBase | Mapping[Any, Tensor]) -> Layout | None:
        """Return the packed layout of the rows ``[N, T]``, or of their entries, on the CPU; or None.

        None if :attr:`shared_prompt` is False, the model's attention has been changed since, or padding precedes a
        token, also in a tree. Other errors are as in :meth:`log_probs`, but the length of the rows is not checked.
        """
        tokens, attention_mask, assistant_mask = (rows[key].cpu() for key in self.in_keys)
        attention_mask, assistant_mask = attention_mask.bool(), assistant_mask.bool()
        if bool(assistant_mask[:, 0].any()):
            row = int(assistant_mask[:, 0].nonzero()[0])
            raise ValueError(f"row {row} begins with an assistant token, which no token predicts; prepend a prompt")
        if len(outside := (assistant_mask & ~attention_mask).nonzero()):
            row, position = outside[0].tolist()
            raise ValueError(
                f"position {position} of row {row} is padding in all_attention_mask, but an assistant token in "
                "all_assistant_mask; make the second False there"
            )
        text: Any = base_model(self.model).config.get_text_config()  # also that of models with the same config object
        packs = self.shared_prompt and text._attn_implementation == SHARED_ATTENTION
        if not (packs and is_right_padded(attention_mask)):
            return None
        parents = rows.get(keys.PARENTS, None)
        layout = pack(tokens, attention_mask, assistant_mask, None if parents is None else parents.cpu())
        if rows.get(keys.SUPPORT_IDS, None) is not None:
            layout.support = _support_sets(rows)
        return layout


def _support_sets(rows: Any) -> SupportSets:
    """Return the sampling supports of all assistant tokens, row after row, on the CPU."""
    tokens, mask = rows.get(keys.FULL_TOKENS).cpu(), rows.get(keys.ASSISTANT_MASK).cpu().bool()
    ids, counts = rows.get(keys.SUPPORT_IDS).cpu(), rows.get(keys.SUPPORT_COUNTS).cpu()
    real = torch.arange(ids.shape[1]) < counts.sum(1, keepdim=True)
    return SupportSets.of(ids[real], counts[mask], tokens[mask])


class Scorer(nn.Module):
    """Module in a :class:`CausalPolicy` whose ``forward`` makes all computations, so that FSDP2 gathers parameters."""

    def __init__(self, model: nn.Module, temperature: float, with_entropy: bool, entropy_grad: bool):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.with_entropy, self.entropy_grad = with_entropy, entropy_grad
        base = base_model(model)
        self.softcap: float | None = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
        self.logit_scale = _logit_scale(base, self.softcap)
        self.half_head: Tensor | None = None  # copy of the head's weight, set while in ``half_weights``

    def forward(
        self, layout: Layout | None, *rows: Tensor, support: SupportSets | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies as :meth:`CausalPolicy.log_probs`, of a layout or else of padded rows.

        Right-padded rows: tokens and assistant mask ``[N, T]``; for trees also the two tensors of
        :func:`~sota_grpo.policy.shared_prompt.branch_rows`. All are on the model's device.
        """
        model = base_model(self.model)
        if layout is not None:
            hidden = packed_hidden(model, layout).index_select(0, layout.predicting)
            targets, support = layout.targets, layout.support
        else:
            tokens, mask, *branches = rows
            if branches:
                hidden = padded_hidden(model, branches[0]).flatten(0, 1)[branches[1]]
            else:
                hidden = padded_hidden(model, tokens)[:, :-1][mask[:, 1:]]
            targets = tokens[:, 1:][mask[:, 1:]]
        head: Any = model.get_output_embeddings()
        weight, shard = head.weight, None
        if isinstance(weight, DTensor):  # this rank's rows of a head that tensor parallelism divides
            mesh, weight = weight.device_mesh, weight.to_local()
            shard = VocabShard(mesh.get_local_rank() * len(weight), mesh.get_group())
        options: dict[str, Any] = {"with_entropy": self.with_entropy, "entropy_grad": self.entropy_grad}
        options["temperature"] = self.temperature / self.logit_scale
        options |= {"bias": head.bias, "softcap": self.softcap}
        if support is not None:  # few logits per token: every rank computes all of them from the gathered head
            weight = weight if shard is None else head.weight.full_tensor()
            log_probs, entropy = support_log_probs(hidden, weight, support, **options)
        else:
            options["copy"] = self.half_head
            log_probs, entropy = chunked_log_probs(hidden, weight, targets, vocab_shard=shard, **options)
        nothing = log_probs.new_zeros(mask.shape if layout is None else layout.packed_at.shape)
        # no view: FSDP2 hooks these tensors
        spread = partial(nothing.masked_scatter, mask) if layout is None else partial(nothing.put, layout.slots)
        return spread(log_probs), None if entropy is None else spread(entropy)


def takes_packed_rows(model: PreTrainedModel, reason: str | None) -> bool:
    """Return True if ``reason`` (why rows cannot be packed) is None, else log it as a warning and return False."""
    if reason is not None:
        logger.warning(
            "%s does not compute equal prompts once; padded rows take more time and memory: %s.",
            type(model).__name__,
            reason.rstrip("."),
        )
    else:
        logger.info("%s computes packed rows, equal prompts once.", type(model).__name__, extra={"file_only": True})
    return reason is None


#: Config keys of a factor of the logits, and its exponent: Cohere; Granite; HyperCLOVA X.
_LOGIT_SCALES = (("logit_scale", 1), ("logits_scaling", -1), ("logits_scaling", 1))


@torch.no_grad()
def _logit_scale(model: PreTrainedModel, softcap: float | None) -> float:
    """Return the factor of the logits of ``model``; UserError if it changes them otherwise, except by ``softcap``.

    The model's logits for a few tokens are compared with ``scale * (weight h + bias)``, softcapped or not, of the
    decoder's ``h``, which detects every scale, cap or projection around the head, even one without a configuration key.
    """
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"The output layer of {type(model).__name__} is a {type(head).__name__}; only nn.Linear is supported; use "
            "another model."
        )
    seen: dict[str, Tensor] = {}
    hooks = [
        decoder.register_forward_hook(lambda _m, _i, output: seen.update(hidden=output.last_hidden_state)),
        head.register_forward_hook(lambda _m, inputs, output: seen.update(fed=inputs[0], logits=output)),
    ]
    try:
        # Ids spread over the vocabulary: a padding id alone embeds to zeros and would make any scale look like 1.
        tokens = torch.linspace(0, head.out_features - 1, 8, device=head.weight.device).long().unsqueeze(0)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    expected, text = seen["logits"].float(), model.config.get_text_config()
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    if seen["hidden"].shape == seen["fed"].shape and torch.equal(seen["hidden"], seen["fed"]):
        named = [(getattr(text, name, None), power) for name, power in _LOGIT_SCALES if softcap is None]
        close = 1e-2 if head.weight.dtype.itemsize < 4 else 1e-4  # a cap changes small logits by little
        for scale in (1.0, *(value**power for value, power in named if isinstance(value, (int, float)) and value > 0)):
            if torch.allclose(scale * expected, logits, rtol=close, atol=1e-5):
                return scale
    raise UserError(
        f"{type(model).__name__} changes hidden states or logits around its head in an unsupported way; use a "
        "model whose logits are lm_head(decoder(tokens)), softcapped or scaled by its config."
    )


def packed_hidden(model: PreTrainedModel, layout: Layout) -> Tensor:
    """Return last hidden states ``[L, H]`` of packed tokens; the model must use :data:`SHARED_ATTENTION`."""
    decoder: Any = model.get_decoder()
    tables = layout.tables if layout.tokens.device.type in KERNEL_DEVICES else None
    if tables is not None and (hidden := decoder_layer.hidden_in_blocks(decoder, layout, tables)) is not None:
        return hidden.squeeze(0)
    no_mask = layout.tokens.new_ones((1, 1, 1, 1), dtype=torch.bool)  # so that transformers makes none
    output = decoder(
        input_ids=layout.tokens.unsqueeze(0),
        attention_mask=no_mask,
        position_ids=layout.positions,
        use_cache=False,
        layout=layout,
        tables=tables,
    )
    return output.last_hidden_state.squeeze(0)


def padded_hidden(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return last hidden states ``[N, T, H]`` of right-padded rows, each with its whole prompt."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    decoder: Any = model.get_decoder()  # the causal mask hides the padding already
    return decoder(input_ids=tokens, attention_mask=None, position_ids=positions, use_cache=False).last_hidden_state


def use_shared_attention(model: PreTrainedModel) -> str | None:
    """Switch ``model`` to attention over packed rows and return None; or return, as a clause, why that is impossible.

    If a test of a few rows fails, or packing changes hidden states by more than rounding, the former attention is kept.
    """
    config: Any = model.config.get_text_config()
    before = config._attn_implementation
    if before not in ("sdpa", SHARED_ATTENTION):
        return f"its attention is {before}"
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if any(re.search("att.*drop", name) and rate for name, rate in vars(config).items()):
        return "its attention has dropout"
    # on CUDA half precision uses another kernel
    autocasts = [False, True] if model.device.type == "cuda" else [False]
    training = model.training
    model.eval()
    try:
        model.set_attn_implementation(SHARED_ATTENTION)
        reason = next((difference for half in autocasts if (difference := _difference(model, config, half))), None)
    except Exception as error:  # the model's code runs here: if it fails, rows are padded
        *_, frame = traceback.extract_tb(error.__traceback__)
        is_ours = Path(frame.filename).is_relative_to(Path(__file__).parent)
        if is_ours and isinstance(error, (TypeError, AttributeError, NameError)):
            raise  # an error in this package, or an untested version of torch
        reason = sentence(error)
    finally:
        model.train(training)
    if reason is not None:
        model.set_attn_implementation(before)
    return reason


@torch.no_grad()
def kernel_difference(model: PreTrainedModel, device: torch.device) -> str | None:
    """Return why attention over packed rows cannot run on ``device``, as a clause; None if it can.

    The bfloat16 kernel is run there on random rows with the model's heads, and compared with float32 on the CPU.
    """
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    width = head_width(config)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    layout = _sample(model)[2].to(torch.device("cpu"))
    length = len(layout.tokens)
    rng = torch.Generator().manual_seed(0)  # not the global state: only rank 0 runs this
    query, key, value = (torch.randn(1, count, length, width, generator=rng) for count in (heads, key_heads, key_heads))
    expected, _ = shared_attention(model, query, key, value, None, layout=layout, tables=layout.tables)
    query, key, value = (tensor.to(device, torch.bfloat16) for tensor in (query, key, value))
    try:
        layout = layout.to(device)
        there, _ = shared_attention(model, query, key, value, None, layout=layout, tables=layout.tables)
    except RuntimeError as error:  # no kernel for this device
        return sentence(error)
    gap = float((there.cpu().float() - expected).abs().max() / expected.abs().max())
    return None if gap <= 5e-2 else f"its attention on {device} differs by {gap:.1g} of its size"


def head_width(config: Any) -> int:
    """Return the number of columns of an attention head, by the config of the decoder."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def _difference(model: PreTrainedModel, config: Any, autocast: bool) -> str | None:
    """Return how packed rows change hidden states, as a clause; None if by rounding only. Three rows are tested."""
    tokens, real, layout = _sample(model)
    device = tokens.device
    eagerly = torch.compiler.set_stance("force_eager")  # compiled layers do not record their windows
    with eagerly, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        packed = packed_hidden(model, layout)[layout.packed_at.to(device)[real]].float()
        padded = padded_hidden(model, tokens)[real].float()
    if len(layout.windows) != config.num_hidden_layers:
        return "not every layer calls transformers' attention interface"
    sliding = ["sliding_attention"] * bool(getattr(config, "sliding_window", None))
    kinds = getattr(config, "layer_types", None) or sliding
    if sum(window is not None for window in layout.windows) < list(kinds).count("sliding_attention"):
        return "its sliding-window layers do not pass their window to the attention"
    wide = next(model.parameters()).dtype in (torch.float32, torch.float64) and not autocast
    close = 1e-4 if wide else 5e-2
    gap = float((packed - padded).abs().max() / padded.abs().max())
    return None if gap <= close else f"packed rows change its hidden states by {gap:.1g} of their size"


def _sample(model: PreTrainedModel) -> tuple[Tensor, Tensor, Layout]:
    """Return three right-padded test rows: token ids ``[3, 9]``, attention mask and packed layout, on the device."""
    config, device = model.config.get_text_config(), next(model.parameters()).device
    ids = torch.linspace(0, config.vocab_size - 1, 24, device=device).long()
    picked = [[0, 1, 2, 3, 6, 7, 8], [4, 5, 9, 10, 11, 12], [0, 1, 2, 3, 13, 14, 15, 16, 17]]
    tokens = nn.utils.rnn.pad_sequence([ids[row] for row in picked], batch_first=True)
    position = torch.arange(tokens.shape[1], device=device)
    lengths, prompts = torch.tensor([[[7], [6], [9]], [[4], [2], [4]]], device=device)
    real = position < lengths
    return tokens, real, pack(tokens, real, real & (position >= prompts)).to(device)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model, unwrapped from peft's LoRA wrapper if it has one."""
    unwrap = getattr(model, "get_base_model", None)  # peft's, which is not imported to ask
    return cast(PreTrainedModel, model if unwrap is None else unwrap())


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers of ``model``: modules of the classes that its ``_no_split_modules`` names."""
    names = set(model._no_split_modules or ())
    kinds = ((module, type(module).__mro__) for module in model.modules())  # FSDP2 makes a sharded one a subclass
    return [module for module, bases in kinds if not names.isdisjoint(kind.__name__ for kind in bases)]


def layer_matrices(policy: CausalPolicy) -> list[torch.nn.Parameter]:
    """Return all two-dimensional parameters of the decoder layers, thus no embedding, head, bias or norm."""
    layers = decoder_layers(base_model(policy.model))
    return [parameter for layer in layers for parameter in layer.parameters() if parameter.ndim == 2]


def fuse_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers of ``model`` in place; the first forward pass then takes half a minute.

    Layers are joined if :func:`joins_products` allows. Results change by rounding. Copies are not compiled.
    """
    if not joins_products(model):
        for layer in decoder_layers(model):
            layer.compile(**decoder_layer.compile_options())


@torch.no_grad()
def joins_products(model: PreTrainedModel) -> bool:
    """Make the decoder layers joined layers (:mod:`.decoder_layer`) if GPU and layers allow; return whether they are.

    ``model`` must use :data:`SHARED_ATTENTION`. If hidden states of a few rows change by more than rounding, the layers
    are restored and a warning is logged.
    """
    device, layers = model.device.type, decoder_layers(model)
    if device not in KERNEL_DEVICES or not layers or not all(map(decoder_layer.fits, layers)):
        return False
    if not takes_kernels(model.device, torch.bfloat16, head_width(model.config.get_text_config())):
        return False
    if next(model.parameters()).dtype != torch.float32:  # others are not cast, and joining them would copy them
        return False
    layout = _sample(model)[2]

    def hidden() -> Tensor:
        with torch.compiler.set_stance("force_eager"), torch.autocast(device, torch.bfloat16):
            return packed_hidden(model, layout).float()

    expected = hidden()
    decoder_layer.join_products(layers, layout.windows)
    gap = float((hidden() - expected).abs().max() / expected.abs().max())
    if gap <= 2e-2:
        return True
    logger.warning(
        "Matrix products of %s are not joined: that changes its output by %.1g of the maximum; its layers are kept.",
        type(model).__name__,
        gap,
    )
    for layer in layers:
        del layer.joined, layer.forward
    return False


def end_token_ids(tokenizer: Any, generation_config: Any = None) -> tuple[int, ...]:
    """Return the sorted token ids that end a response: those of tokenizer, generation config and chat template.

    Qwen2.5's base models, for example, declare ``<|endoftext|>``, but their template ends turns with ``<|im_end|>``.
    Ids of config and template are stored as ``tokenizer.known_ends``, for later calls without ``generation_config``.
    The result may be empty. UserError if an ``eos_token_id`` of the config is not an integer.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    known = getattr(tokenizer, "known_ends", None)
    if known is None or generation_config is not None:
        named = getattr(generation_config, "eos_token_id", None)
        known = {*(named if isinstance(named, (list, tuple)) else [named]), end_of_turn(tokenizer)}
        if odd := [token for token in known - {None} if not isinstance(token, int)]:
            raise UserError(
                f"generation_config.json or config.json has eos_token_id={odd[0]!r}, which is not a token id; correct "
                "the model's file."
            )
        with suppress(AttributeError):  # a class with slots: computed again at each call
            tokenizer.known_ends = known
    return tuple(sorted({*known, eos} - {None}))


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the id of the first added or special token after an assistant turn in the chat template, or None.

    Added tokens that are blank, such as Gemma's for several line breaks, also occur within a turn and end none.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": _PLAIN}, {"role": "assistant", "content": _PLAIN}]
    try:
        _, mark, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_PLAIN)
    except Exception:  # a template is the model's program; if prompts need it, its error is reported there
        return None
    known = getattr(tokenizer, "added_tokens_decoder", {})
    added = {*tokenizer.all_special_ids, *(number for number, token in known.items() if token.content.strip(" \n\t▁"))}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if mark else []
    return next((number for number in ids if number in added), None)


def response_text(tokenizer: Any, token_ids: Any) -> str:
    """Return the text of a response, ids ``[R]``, without end tokens and padding; other special tokens are kept."""
    left_out = {*end_token_ids(tokenizer), getattr(tokenizer, "pad_token_id", None)}
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    said = [number for number in ids if number not in left_out]
    # some tokenizers would remove spaces beside signs, as in ' '.join(words)
    return tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def adapter_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the LoRA adapter of ``model`` is off; ValueError if ``model`` has no adapter."""
    if base_model(model) is model:
        raise ValueError(f"{type(model).__name__} has no adapter to switch off; add one with add_lora first")
    adapted: Any = model
    return adapted.disable_adapter()


class ReferencePolicy(Protocol):
    """Protocol of a reference: maps padded rows to float32 log-probs ``[N, T]``, 0 where the assistant mask is False.

    ``shared_prompt``: whether a caller that limits the tokens of a call may count each prompt once.
    """

    shared_prompt: bool

    def __call__(self, rows: TensorDictBase) -> torch.Tensor: ...

    def close(self) -> None: ...  # idempotent


Context = Callable[[], AbstractContextManager[Any]]  # makes the context in which a reference computes


class _Computed:
    """Reference policy that computes with a :class:`CausalPolicy` in this process until it is closed."""

    def __init__(self, policy: CausalPolicy, autocast: Context, context: Context = nullcontext) -> None:
        self._policy: CausalPolicy | None = policy
        self._autocast, self._context, self.shared_prompt = autocast, context, policy.shared_prompt

    @torch.no_grad()
    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probabilities ``[N, T]`` on the device of the rows; RuntimeError after ``close()``."""
        if self._policy is None:
            raise RuntimeError("the reference policy was closed and cannot compute log-probabilities any more")
        with self._autocast(), self._context():
            log_probs, _ = self._policy.log_probs(rows)
        return log_probs.to(rows.get(keys.FULL_TOKENS).device)

    def close(self) -> None:
        self._policy = None


class FrozenReference(_Computed):
    """Reference policy with its own weights, on the device of its model.

    Args:
        model: the reference model; it is frozen and put in evaluation mode, so pass a copy of a model that is trained.
        autocast: function that returns the learner's autocast context, so that the KL of equal weights is 0.
        options: keyword arguments of :class:`CausalPolicy` except ``with_entropy``; its errors are raised.
    """

    def __init__(self, model: nn.Module, *, autocast: Context = nullcontext, **options: Any) -> None:
        super().__init__(CausalPolicy(model.requires_grad_(False).eval(), with_entropy=False, **options), autocast)


class AdapterOffReference(_Computed):
    """Reference policy that computes with the base weights of a LoRA ``policy``; ValueError without an adapter."""

    def __init__(self, policy: CausalPolicy, *, autocast: Context = nullcontext) -> None:
        with adapter_disabled(policy.model):
            pass  # refuses a model without an adapter now rather than in the first step
        super().__init__(policy, autocast, partial(adapter_disabled, policy.model))
