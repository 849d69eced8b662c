"""Bytes that a training step, a reference and an engine hold at their peak, counted from the shape of a model.

Counted is what this project's code keeps: rows packed with each prompt once, attention that saves its inputs and
output and one number per token and head, logits in tiles, an update in place.

The moments of an optimizer step that can be its peak, for the first micro-batch, which finds no gradients, and the
next, which finds them all (``G``); ``E`` is the gradient of the head (bytes per weight times vocabulary times hidden)::

    head        activations of all layers, tiles of logits, E, the gradient of the hidden states
    decoder     activations of all layers, E where it waits for a tied embedding or is new, one MLP's gradients
    embedding   G, and where head and embedding are tied, E once more: each has made a dense gradient by then
    step        G, and what the optimizer works with (:mod:`sota_grpo.policy.optimizers`)

Weights and the optimizer's state are there throughout. What the C library's heap cannot give back is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sota_grpo.functional.log_probs import LOGITS_BYTES, LOGITS_BYTES_ON_CPU
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.optimizers import OPTIMIZERS, Trained
from sota_grpo.policy.shared_prompt import MOST_PIECES

KEPT_BYTES = 76  # of a token of a kept set: indices, logit, softmax and entropy (60 where that has no gradient)
COMPILED = 0.6  # of what eager layers save in float32 under autocast: five peaks of an H100 within 6 %
SLOT_BYTES = 150  # of a padded slot in the elementwise loss, see sota_grpo.functional.micro_batches.fill
VLLM_PASS_TOKENS = 8192  # that vLLM computes at once, its default
Parts = dict[str, int]  # bytes by what they are


@dataclass(frozen=True)
class Learning:
    """How a policy is trained, as far as its memory depends on it."""

    weight_bytes: int = 4  # per weight
    product_bytes: int = 4  # per number of the matrix products: 2 under autocast to half precision, else weight_bytes
    rank: int = 0  # of a LoRA adapter on every linear layer, kept in float32; 0 trains all weights
    dropout: bool = False  # the adapter's inputs are dropped at random
    checkpointing: bool = False  # a layer's activations are computed again in the backward pass
    ranks: int = 1  # processes among which weights, gradients and moments are divided (FSDP2, tensor parallelism)
    parallel: int = 1  # of them those that divide what others gather whole; activations are counted as if whole
    shard_gradients: bool = False  # several ranks sum gradients after every micro-batch; else each holds them whole
    on_cpu: bool = True  # the tiles of logits are small
    repeats_keys: bool = False  # attention saves keys and values per query head (padded rows; CUDA in float32)
    kept: int = 0  # most tokens of a kept set, where sampling is truncated
    kept_tiles: int = 0  # most bytes of logits kept for the backward pass: sota_grpo.functional.log_probs.kept_limit
    quantized: bool = False  # the matrices of layers are in 4 bits, under an adapter
    compiled: bool = False  # layers are compiled, on a GPU
    optimizer: str = "adamw"  # of sota_grpo.policy.optimizers

    @property
    def casts(self) -> bool:
        return self.product_bytes != self.weight_bytes

    @property
    def tile_bytes(self) -> int:
        return LOGITS_BYTES_ON_CPU if self.on_cpu else LOGITS_BYTES

    def base_bytes(self, model: Architecture) -> int:
        """Of the weights without an adapter; in 4 bits with scales as in arXiv:2305.14314, section 3."""
        matrices = model.layers * model.layer_matrices if self.quantized else 0
        packed = matrices // 2 + matrices // 64 + matrices // (64 * 64)
        return (model.parameters - matrices) * self.weight_bytes + packed

    def optimizer_bytes(self, model: Architecture) -> int:
        """What the optimizer keeps between two steps."""
        trained = Trained.of(model, rank=self.rank, weight_bytes=self.weight_bytes)
        return OPTIMIZERS[self.optimizer].state_bytes(trained)

    def trained_bytes(self, model: Architecture) -> int:
        """Of all weights that have a gradient, and so of their gradients and of each moment."""
        return 4 * model.adapter_parameters(self.rank) if self.rank else self.weight_bytes * model.parameters


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the policy at once."""

    tokens: int  # packed, each prompt once
    predicted: int  # those that the policy wrote, which have logits
    slots: int  # rows times the longest row


def _layer_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """What one decoder layer saves for its backward pass; ``c`` bytes per number of the matrix products."""
    hidden, width, inner, c = model.hidden, model.query_width, model.intermediate, how.product_bytes
    of_norm = 0 if how.rank else how.weight_bytes * hidden
    per_token = 2 * (4 * hidden + 4 + of_norm)  # of two norms: inputs in float32, inverse roots, what they normed
    per_token += 2 * c * width + 4 * model.heads  # of attention queries, output and the log-sum of each head
    per_token += 4 * c * inner  # of the MLP gate, silu(gate), up, and their product
    if not how.rank:
        per_token += (5 if how.casts else 2) * c * hidden  # inputs of q, k, v and of gate, up; five where they are cast
    else:
        per_token += len(model.linear_layers) * c * how.rank
        if how.dropout:  # each layer drops for itself: noise (a bit in a byte on CUDA) and input; no product is kept
            per_token += ((4 if how.on_cpu else 1) + c) * (5 * hidden + width + inner) - c * inner
        else:
            per_token += c * (5 * hidden + width) if how.casts or c != 4 else 2 * c * hidden
    if model.qk_norm:
        per_token += (4 + (0 if how.rank else c)) * (width + model.kv_width) + 4 * (model.heads + model.kv_heads)
    return rows.tokens * (per_token + 2 * c * (width if how.repeats_keys else model.kv_width))


def decoder_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """What the decoder has saved when its last layer is through: its layers, or under checkpointing their inputs; the
    cosines and sines of the positions; the last norm; under autocast without checkpointing the weights in 2 bytes.

    >>> tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> rows = MicroBatch(tokens=10, predicted=6, slots=20)
    >>> decoder_bytes(tiny, Learning(), rows)  # 2 layers of 10 * 4 (48 + 16 + 8 + 64 + 2 + 2), positions 320, norm 680
    12200
    """
    if how.checkpointing:
        layers = model.layers * rows.tokens * how.weight_bytes * model.hidden
    else:
        cast = how.product_bytes * model.layer_matrices if how.casts and not how.quantized else 0
        share = COMPILED if how.compiled and how.casts and not how.rank else 1
        layers = model.layers * (round(share * _layer_bytes(model, how, rows)) + cast)
    return layers + rows.tokens * 2 * how.weight_bytes * model.head_dim + _last_norm_bytes(model, how, rows)


def _last_norm_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    return rows.tokens * (4 * model.hidden + 4 + (0 if how.rank else how.weight_bytes * model.hidden))


def head_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Saved by the log-probs: hidden states, or with a frozen head the slopes; places, targets and three vectors."""
    return rows.predicted * (how.product_bytes * model.hidden + 8 + (0 if how.rank else 20))


def _head_working_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Of the head's backward pass: tiles, the gradient of the hidden states, one tile of that of the weight."""
    wide = 4 * rows.predicted * model.hidden
    if how.kept:
        return how.tile_bytes + 2 * wide + rows.predicted * how.kept * KEPT_BYTES
    if how.rank:
        return how.tile_bytes + 2 * wide
    half = how.product_bytes if how.product_bytes < 4 else 0
    columns = math.isqrt(how.tile_bytes // (8 + half))
    probabilities = rows.predicted * model.vocab * how.product_bytes  # kept for the backward pass where they are few
    kept = probabilities if probabilities <= how.kept_tiles and how.parallel == 1 else 0
    tile = how.tile_bytes + 4 * model.hidden * min(columns, model.vocab) + kept
    return tile + wide + half * rows.predicted * model.hidden


def learner_memory(model: Architecture, how: Learning, micro_batches: Sequence[MicroBatch]) -> Parts:
    """Peak of an optimizer step on one rank, once the optimizer has its moments; the first two micro-batches count.

    >>> tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)  # of 1448 parameters
    >>> parts = learner_memory(tiny, Learning(), [MicroBatch(tokens=10, predicted=6, slots=20)])
    >>> parts | {"logits": parts["logits"] - 8 * 2**20}  # the tiles decide: the head's moment, 12200 + 20 * 150 + 360
    {'weights': 5792, 'gradients': 1024, 'optimizer': 11584, 'activations': 15560, 'logits': 1216}
    """
    whole, optimizer = how.trained_bytes(model), how.optimizer_bytes(model)
    weights = how.base_bytes(model) + (whole if how.rank else 0)
    if how.ranks > 1:  # each gathers embedding, head and two layers
        gathered = (model.embedding_parameters + 2 * model.layer_parameters) * how.weight_bytes // how.parallel
        passing = 0 if how.rank else gathered - model.layer_parameters * how.weight_bytes // how.parallel
        weights, optimizer = -(-weights // how.ranks) + gathered, -(-optimizer // how.ranks)
        whole = -(-whole // how.ranks) + passing if how.shard_gradients else -(-whole // how.parallel)
    c, w, moments = how.product_bytes, how.weight_bytes, []
    head = 0 if how.rank else w * model.head_weights
    for carried, rows in zip((0, whole), micro_batches):
        saved = decoder_bytes(model, how, rows) + rows.slots * SLOT_BYTES
        of_head = head_bytes(model, how, rows)
        one_layer = rows.tokens * 2 * (c * model.intermediate + w * model.hidden)  # what its MLP works with
        if how.quantized:  # the largest matrix as it is computed with, and its copy in half precision
            one_layer += model.hidden * max(model.intermediate, model.query_width) * (w + (c if how.casts else 0))
        if not how.on_cpu:  # sums of the gradients of prompts' keys and values: sota_grpo.policy.shared_prompt
            one_layer += MOST_PIECES * 2 * 4 * model.kv_width * max(0, rows.tokens - rows.predicted)
        cast = c * model.layer_matrices if how.checkpointing and how.casts and not how.quantized else 0
        if how.checkpointing:
            one_layer += _layer_bytes(model, how, rows) + cast
        moments.append((carried + head, saved + of_head, _head_working_bytes(model, how, rows)))
        waiting = head if model.tied or not carried else 0
        moments.append((carried + waiting, saved - _last_norm_bytes(model, how, rows) + one_layer, 0))
        if cast and not how.rank and how.ranks == 1:
            # autocast keeps what it cast until the forward pass ends; with several ranks it keeps nothing
            moments.append((carried, saved + of_head + model.layers * cast, how.tile_bytes))
    made_anew = head * (int(model.tied) + int(len(micro_batches) > 1))
    moments.append((whole + made_anew, 0, 0))
    trained = Trained.of(model, rank=how.rank, weight_bytes=how.weight_bytes)
    moments.append((whole, 0, OPTIMIZERS[how.optimizer].step_bytes(trained, how.on_cpu)))
    gradients, activations, logits = max(moments, key=sum)
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return parts | {"activations": activations, "logits": logits}


def forward_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """What a forward pass without gradient holds beside the weights: one layer's MLP, one cast matrix, and the head."""
    c, w = how.product_bytes, how.weight_bytes
    layer = rows.tokens * 3 * (c * model.intermediate + w * model.hidden)
    cast = c * model.hidden * max(model.intermediate, model.query_width) if how.casts else 0
    hidden = rows.predicted * model.hidden * (w + (c if how.casts else 0))
    return layer + cast + hidden + rows.slots * SLOT_BYTES + how.tile_bytes + rows.predicted * how.kept * KEPT_BYTES


def kv_bytes_per_token(model: Architecture, number_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * model.layers * model.kv_width * number_bytes


def vllm_pool_bytes(model: Architecture, share: int, *, number_bytes: int, rows: int, parallel: int = 1) -> int:
    """What vLLM has left of its ``share`` for keys and values on each of ``parallel`` devices, below 0 if it is too
    small: less the weights, one pass of 8192 tokens (vLLM measures its own), and float32 logits of all rows, twice.
    """
    passing = VLLM_PASS_TOKENS * 3 * (model.intermediate + model.hidden)
    return share - (model.parameters + passing) * number_bytes // parallel - rows * model.vocab * 8
