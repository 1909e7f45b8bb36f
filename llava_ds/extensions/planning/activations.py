# T tokens of a micro-batch, S supervised ones, N image tiles of P patches each, C tower width, D language-model width,
# I width of its MLP, Q and K widths of query and key, H heads, V vocabulary, L layers, w bytes of an activation
"""The memory of a micro-batch without padding: saved for backward, and needed meanwhile, for layers like Llama's.

A layer of a trained language model saves

    norms       2 T D (4 + 2w)    the input in fp32, normalised, and times its weight: the input of the matrices
    attention   T w (2Q + 2K)     query, key, value, output; no T x T matrix (and 4 T H of sums)
    MLP         4 T w I           gate, its activation, up, and their product

and a frozen one, through which gradients only pass, 2 T D 4 + T w (2Q + 2K) + 3 T w I: matrices that do not train save
no inputs. With LoRA they do, but norms do not train: 2 T D (4 + w), and beside the rest LoRA's own
T w R, R its ranks together, and with dropout for every matrix what is left of its input, and which part that is; with
DoRA 2 T w O, O the widths of its outputs.
Norms behind attention and MLP save T D (4 + w) each, those of query and key T (Q + K) (4 + w); Gemma's, whose weights
multiply in fp32, 8 in the place of 4 + w. Where the tokens of one image see each other, attention counts twice. A
layer that takes embeddings of its own, p wide, saves T (w (D + 3 p)), and outside of it T p (8 + w), for they are
normalised for all layers at once. Ranks
that share samples (sequence parallelism) have T / s of the tokens each, in attention T tokens of some heads, and
meanwhile two copies of what they exchange. A frozen tower runs without gradients and saves nothing; of one that trains
each layer saves about N P w (8C + 2I), a CLIP's 3I, more with norms in fp32 or a gate (TowerShape). The projector saves
N P w (C + 2D). Logits are not saved; while the loss and its gradients are computed, a chunk of them exists in fp32 and,
in bf16, once more, and beside it the gradient of the output layer: V D w from one chunk, from several V D 4 and, at the
end, V D w too. What the last layer saves at positions that are not supervised is not subtracted. With MLPs that take
some tokens at a time (--mlp_tile_tokens), what they save and need meanwhile is that of so many tokens. With
checkpointing a layer saves its input, T w D, and is recomputed in backward. A layer with a state saves T (2 w C +
(12 + 3 w) V), C the width of what it convolves and V of its values, whose norm and gate are computed in fp32; that is
with kernels, for sample by sample in torch it is more. A stage of a pipeline has some of the
layers, and beside them, for each micro-batch that it has begun, T w D of what came in and of what went out.

Beside the saved tensors, backward through a layer needs about T w (3I + 2D), of one that trains or has LoRA 2I, and at
least T (2w + 8) D, and the tower alone one layer's N P w (3C + 3I) and the pixels in fp32. The largest moment counts.
A mixture of experts counts as an MLP that saves as much (TextShape.intermediate), and 5I beside a norm's 8D for
backward: up to a half above what it takes.
Source: transformers' modeling_llama (eager norms and MLP, attention that is fused), model/llava.py.
"""

import math
from dataclasses import dataclass

from llava_ds.extensions.planning.shapes import ModelShape, TextShape
from llava_ds.extensions.planning.tower_shape import TowerShape
from llava_ds.model.output_loss import chunk_rows


@dataclass(frozen=True)
class MicroBatch:
    """The micro-batch of a rank. num_recomputed: checkpointed layers of the language model; mlp_tokens: those that an
    MLP takes at a time and computes once more in backward, None for all."""

    num_tokens: int
    num_supervised: int
    num_tiles: int
    num_recomputed: int = 0
    mlp_tokens: int | None = None

    @property
    def has_tiled_mlps(self) -> bool:
        """True if MLPs keep nothing but their input."""
        return self.mlp_tokens is not None and self.mlp_tokens < self.num_tokens


def activation_bytes(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """The most that a micro-batch needs beside model states; 0 for a model of which only the size is known."""
    if shape.text is None or shape.tower is None:
        return 0
    text, w = shape.text, weight_bytes
    tokens = batch.num_tokens
    tiled = batch.has_tiled_mlps
    largest = text.largest_layer
    again = layer_bytes(largest, tokens, w, tiled) if batch.num_recomputed else 0  # the layer computed once more
    saved, head = saved_bytes(shape, batch, w), head_bytes(text, batch, w) if shape.is_last else 0
    # A critic goes backward before the actor's loss does, while the actor keeps all that it saved.
    below = saved if shape.has_critic else saved - head
    at_the_loss = head + (saved - head) // (2 if shape.has_critic else 1)
    at_the_loss += loss_bytes(text, batch.num_supervised, w) if shape.is_last else 0
    # What dropout saved for the MLP's first two matrices to go backward is gone by then; where matrices keep inputs,
    # so is the last one's.
    gone = (w + 1) * (text.intermediate + text.hidden) if text.adapter_dropped else 0
    keeps_inputs = text.trained or text.adapter_rank > 0
    mlp = (5 if text.routed else 2 if keeps_inputs else 3) * largest.intermediate
    in_mlps = batch.mlp_tokens * (w * mlp + _mlp_bytes(largest, w)) if tiled else tokens * w * mlp
    # Norms go backward in fp32 when MLPs are done; beside experts they stand for copies of tokens. DoRA measures rows
    # in a forward, of a matrix, its product and their sum.
    norms = tokens * 8 * text.hidden
    at_once = max(in_mlps + norms if text.routed else in_mlps, norms, 4 * w * text.adapter_read)
    in_a_layer = below + again + tokens * (w * 2 * text.hidden - gone) + at_once
    return max(at_the_loss, in_a_layer, _in_the_tower(shape, batch, w) if shape.is_first else 0)


def exchange_buffers(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """The most that the exchange around attention holds: what is sent and what is received of query, key and value."""
    return 0 if shape.text is None else 2 * exchanged_bytes(shape.text, batch.num_tokens, weight_bytes)[0]


def exchanged_bytes(text: TextShape, num_tokens: float, weight_bytes: int) -> tuple[int, int]:
    """Bytes of a rank's tokens that go through the exchange before attention, and after it, in one forward."""
    before = num_tokens * weight_bytes * (text.query + 2 * text.key)
    return int(before), int(num_tokens * weight_bytes * text.query)


def saved_bytes(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Bytes that are saved between forward and backward."""
    text, tower, w, tokens = shape.text, shape.tower, weight_bytes, batch.num_tokens
    again = batch.num_recomputed
    layers = (text.num_layers - again) * layer_bytes(text, tokens, w, batch.has_tiled_mlps)
    layers += again * tokens * w * text.hidden
    images = _image_bytes(tower, batch, again / text.num_layers, w) if shape.is_first else 0
    rotary = 2 * tokens * w * text.rotary
    rotary += tokens * text.num_layers * text.layer_embedding * (8 + w)
    passed_on = tokens * w * text.hidden * ((not shape.is_first) + (not shape.is_last))
    head = head_bytes(text, batch, w) if shape.is_last else 0
    return (layers + images + rotary + passed_on) * (2 if shape.has_critic else 1) + head


def layer_bytes(text: TextShape, num_tokens: int, weight_bytes: int, tiled: bool = False) -> int:
    """Bytes that one layer of the language model saves. tiled: its MLP saves its input alone."""
    w = weight_bytes
    keeps_inputs = text.trained or text.adapter_rank > 0
    normalised = (4 if text.fp32_norms else w) * text.trained
    norms = text.norms * text.hidden * (4 + normalised) + min(2, text.norms) * text.hidden * w * keeps_inputs
    if text.has_head_norms:
        norms += (text.query + text.key) * (4 + normalised)
    attention = (w * (2 * text.query + 2 * text.key) + 4 * text.num_heads) * (1 + text.in_blocks)
    # Frozen matrices save no input, but what computes them once more does.
    mlp = w * text.hidden * (not keeps_inputs) if tiled else _mlp_bytes(text, w)
    adapters = w * text.adapter_rank + (w + 1) * text.adapter_dropped + 2 * w * text.adapter_scaled
    states = 2 * w * text.convolved + (12 + 3 * w) * text.gated
    embeddings = w * (text.hidden * keeps_inputs + 3 * text.layer_embedding) if text.layer_embedding else 0
    return int(num_tokens * (norms + attention + mlp + adapters + states + embeddings))


def _mlp_bytes(text: TextShape, weight_bytes: int) -> int:
    """Bytes that an MLP saves for a token."""
    return (4 if text.trained or text.adapter_rank > 0 else 3) * weight_bytes * text.intermediate


def head_bytes(text: TextShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Bytes that the last norm, the output layer and the loss save."""
    w = weight_bytes
    norm = batch.num_tokens * text.hidden * (4 + (w if text.trained else 0))
    return norm + batch.num_supervised * w * text.hidden  # the gradient that comes with the loss


def loss_bytes(text: TextShape, num_supervised: int, weight_bytes: int) -> int:
    """The most that exists beside saved tensors while the loss and its gradients are computed."""
    w, rows = weight_bytes, min(num_supervised, chunk_rows(text.vocab, "cuda"))
    logits, gradients = rows * text.vocab, text.vocab * text.hidden
    softmax = (4 + w) * logits if w < 4 else 4 * logits
    if not text.trained:
        return softmax
    if rows == num_supervised:
        return max(softmax, w * (logits + gradients))
    # At the end the sum over chunks is copied to the precision of the weights.
    return 4 * gradients + max(softmax, w * gradients if w < 4 else 0)


def _image_bytes(tower: TowerShape, batch: MicroBatch, recomputed: float, weight_bytes: int) -> int:
    """Bytes that the projector saves, and the tower where it trains. recomputed: share of its layers."""
    features = batch.num_tiles * (tower.num_patches * tower.connector + tower.hidden) * weight_bytes
    if not tower.trained:
        return features
    again = math.ceil(recomputed * tower.num_layers)
    positions = batch.num_tiles * tower.num_positions
    inputs = again * positions * weight_bytes * tower.hidden
    return features + inputs + (tower.num_layers - again) * _tower_layer_bytes(tower, positions, weight_bytes)


def _tower_layer_bytes(tower: TowerShape, positions: int, weight_bytes: int) -> int:
    """Bytes that one layer of a tower that trains saves."""
    return positions * (weight_bytes * tower.saved + 4 * tower.saved_fp32)


def _in_the_tower(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """The most that exists in the tower's forward, or in backward where it trains."""
    tower, w, positions = shape.tower, weight_bytes, batch.num_tiles * shape.tower.num_positions
    pixels = 3 * tower.image_size**2 * batch.num_tiles * (1 + 4 + 4 + w)
    own = pixels + w * positions * (3 * tower.hidden + 3 * tower.intermediate)
    if not tower.trained:
        return own
    own += _image_bytes(tower, batch, batch.num_recomputed / shape.text.num_layers, w)
    return own + (_tower_layer_bytes(tower, positions, w) if batch.num_recomputed else 0)
