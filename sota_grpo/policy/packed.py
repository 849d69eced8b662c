"""A decoder's last hidden states over rows, packed or padded, and whether a model can be given packed rows at all.

On CUDA the decoder's layers can be compiled (:func:`fuse_layers`): norms, rotary positions, gated activations and
residuals, which in eager mode read and write the float32 residual stream many times, become few kernels. The attention
stays outside as it is: it reads the layout of the packed rows, which is another in every micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sota_grpo.policy.layout import Layout, is_right_padded, pack
from sota_grpo.policy.shared_attention import SHARED_ATTENTION, shared_attention

LAYER_TYPES = {"full_attention", "sliding_attention"}
#: Families whose packed rows are tested to equal padded ones: where they are padded, something is wrong.
KNOWN_TO_PACK = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text")
#: Compiled once for training, scoring, adapter on and off, each precision; beyond this torch goes back to eager.
COMPILED_VARIANTS = 32
#: Round where eager does, so that both give the same log-probs.
COMPILE_OPTIONS = {"emulate_precision_casts": True}


def packed_hidden(model: PreTrainedModel, layout: Layout) -> Tensor:
    """Last hidden states ``[L, H]`` in the order of ``layout``, which is on the model's device.

    The model's attention is :data:`SHARED_ATTENTION`: see :func:`use_shared_attention`.
    """
    no_mask = layout.tokens.new_ones((1, 1, 1, 1), dtype=torch.bool)  # transformers makes none where it is given one
    output = model.get_decoder()(
        input_ids=layout.tokens.unsqueeze(0),
        attention_mask=no_mask,
        position_ids=layout.positions,
        use_cache=False,
        layout=layout,
    )
    return output.last_hidden_state[0]


def padded_hidden(model: PreTrainedModel, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states ``[N, T, H]`` of rows that each carry their whole prompt.

    When no real token follows padding, the causal mask alone already hides the padding from every real token; the
    decoder is then spared an explicit ``[T, T]`` mask, which keeps attention on its fastest kernel.
    """
    mask: Tensor | None = attention_mask
    positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    if is_right_padded(attention_mask):
        mask, positions = None, torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    decoder: Any = model.get_decoder()
    return decoder(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state


def use_shared_attention(model: PreTrainedModel) -> str | None:
    """Switch ``model`` to the attention that takes packed rows; else leave it as it is and say why, as half a sentence.

    Whether a model can be packed is measured: a few rows go through it both ways. Without a layout the attention is
    transformers' SDPA, so nothing else changes for whoever uses the model.
    """
    config: Any = model.config.get_text_config()
    before = config._attn_implementation
    if before not in ("sdpa", SHARED_ATTENTION):
        return f"its attention is {before}"
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "attention_dropout", 0.0):
        return "its attention has dropout"
    # on CUDA half precision goes through another kernel
    autocasts = [False, True] if model.device.type == "cuda" else [False]
    try:
        with _evaluating(model):
            model.set_attn_implementation(SHARED_ATTENTION)
            reason = next((found for half in autocasts if (found := _difference(model, config, half))), None)
    except Exception as error:  # any model's own code runs here: what it cannot do is no reason to end
        if isinstance(error, (TypeError, AttributeError, NameError)) and _is_raised_here(error):
            raise  # a mistake of ours, or another torch than was tested
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package's own code raised it, not the model's or torch's."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return Path(frame.filename).is_relative_to(Path(__file__).parent)


@torch.no_grad()
def kernel_difference(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why the attention of packed rows cannot run on ``device``, as half a sentence, for a model that lies elsewhere.

    Its kernel for half precision is given three rows with the model's heads, and compared with plain attention.
    """
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    tokens = torch.tensor([[5, 6, 7, 1, 2], [5, 6, 7, 3, 0], [8, 9, 4, 0, 0]])
    layout = pack(tokens, tokens > 0, torch.tensor([[False, False, False, True, True]]).expand(3, -1) & (tokens > 0))
    length = len(layout.tokens)
    own = torch.Generator().manual_seed(0)  # rank 0 alone is here: its other random numbers stay those of the others
    query, key, value = (torch.randn(1, count, length, width, generator=own) for count in (heads, key_heads, key_heads))
    expected, _ = shared_attention(model, query, key, value, None, layout=layout)
    query, key, value = (each.to(device, torch.bfloat16) for each in (query, key, value))
    try:
        there, _ = shared_attention(model, query, key, value, None, layout=layout.to(device))
    except RuntimeError as error:  # no kernel for this device
        return f"{type(error).__name__}: {error}"
    gap = float((there.cpu().float() - expected).abs().max() / expected.abs().max())
    return None if gap <= 5e-2 else f"its attention on {device} differs by {gap:.1g} of its size"


@torch.no_grad()
def _difference(model: PreTrainedModel, config: Any, autocast: bool) -> str | None:
    """What packed rows change, over two prompts with ragged responses; None where they change rounding only."""
    device = next(model.parameters()).device
    ids = torch.linspace(0, config.vocab_size - 1, 24, device=device).long()
    first, second = ids[:4], ids[4:6]
    rows = [torch.cat(parts) for parts in ((first, ids[6:9]), (second, ids[9:13]), (first, ids[13:18]))]
    said = [torch.arange(len(row), device=device) >= start for row, start in zip(rows, (4, 2, 4))]
    tokens, completion_mask = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (rows, said))
    real = nn.utils.rnn.pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
    layout = pack(tokens, real, completion_mask).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        packed = packed_hidden(model, layout)[layout.place.to(device)[real]].float()
        padded = padded_hidden(model, tokens, real)[real].float()
    if len(layout.windows) != config.num_hidden_layers:
        return "not every layer asks transformers' attention interface"
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * bool(
        getattr(config, "sliding_window", None)
    )
    told = sum(window is not None for window in layout.windows)
    if told < sum(kind == "sliding_attention" for kind in kinds):
        return "its sliding layers do not tell their window"
    wide = next(model.parameters()).dtype in (torch.float32, torch.float64) and not autocast
    close = 1e-4 if wide else 5e-2
    gap = float((packed - padded).abs().max() / padded.abs().max())
    return None if gap <= close else f"packed rows change its hidden states by {gap:.1g} of their size"


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, out of its LoRA wrapper when it has one."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers: what transformers itself keeps together when it spreads a model over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def fuse_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers of ``model`` in place, at their first call: half a minute, for rows of any length.

    One compilation serves all layers. Copies of the model (``copy.deepcopy``) are not compiled. Results differ from
    eager mode by rounding.
    """
    _leave_attention_out()
    limit: dict[str, int] = {}
    if "recompile_limit" in signature(torch.compile).parameters:
        limit = {"recompile_limit": COMPILED_VARIANTS}  # in any thread; the setting below holds in this one only
    else:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, options=COMPILE_OPTIONS, **limit)


@functools.cache
def _leave_attention_out() -> None:
    AttentionInterface.register(SHARED_ATTENTION, torch.compiler.disable(shared_attention))
