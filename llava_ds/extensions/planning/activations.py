# T tokens of a micro-batch, S supervised ones, N image tiles, P patches per tile, C tower width, D language-model
# width, I MLP width, Q and K widths of query and key, H heads, V vocabulary, L layers, w bytes per activation
"""Estimate activation memory of a micro-batch without padding, saved and temporary, for layers like Llama's.

A layer of a trained language model saves

    norms       2 T D (4 + 2w)    the input in fp32, normalised, and times its weight: the input of the matrices
    attention   T w (2Q + 2K)     query, key, value, output; no T x T matrix (and 4 T H of sums)
    MLP         4 T w I           gate, its activation, up, and their product

and a frozen layer that gradients only pass through saves 2 T D 4 + T w (2Q + 2K) + 3 T w I, because frozen matrices
save no inputs. With LoRA, matrices save inputs but norms are frozen: 2 T D (4 + w). LoRA adds T w R, with R the sum of
its ranks. Dropout adds the remaining input and the mask per matrix. DoRA adds 2 T w O, with O the sum of output widths.
Norms after attention and MLP save T D (4 + w) each, query and key norms T (Q + K) (4 + w). Gemma's norms multiply by
fp32 weights: 8 instead of 4 + w. If the tokens of an image see each other, attention counts twice. A layer with input
embeddings of width p saves T (w (D + 3 p)), plus T p (8 + w) outside the layer, because they are normalised for all
layers at once. With sequence parallelism, each rank has T / s tokens, T tokens of some heads in attention, and
temporarily two copies of the exchanged tensors. A frozen tower runs without gradients and saves nothing. In a trained
tower each layer saves about N P w (8C + 2I), in CLIP 3I, and more with fp32 norms or a gate (TowerShape). The projector
saves N P w (C + 2D). Logits are not saved. While the loss and its gradients are computed, a chunk of logits exists in
fp32 and, in bf16, once more. The output layer's gradient then takes V D w for one chunk, or V D 4 for several and, at
the end, also V D w. The last layer is counted in full, although it needs less at unsupervised positions. Tiled MLPs
(--mlp_tile_tokens) save and need as much as one tile's tokens. With checkpointing a layer saves its input, T w D, and
is recomputed in backward. A recurrent layer saves T (2 w C + (12 + 3 w) V), with C the width of its convolution's input
and V the width of its values, whose norm and gate are in fp32. This assumes kernels: torch's loop over samples needs
more. A pipeline stage has a part of the layers and also keeps input and output, T w D each, of every micro-batch in
flight.

In addition to saved tensors, backward through a layer needs about T w (3I + 2D), with 2I if the layer is trained or has
LoRA, and at least T (2w + 8) D. The tower needs N P w (3C + 3I) for one layer, and the pixels in fp32. The largest of
these peaks counts. A mixture of experts counts as an MLP that saves as much (TextShape.intermediate), and in backward
as 5I beyond a norm's 8D, an overestimate of up to one half. Source: transformers' modeling_llama (eager norms and MLP,
fused attention), model/llava.py.
"""

import math
from dataclasses import dataclass

from llava_ds.extensions.planning.shapes import ModelShape, TextShape
from llava_ds.extensions.planning.tower_shape import TowerShape
from llava_ds.model.output_loss import chunk_rows


@dataclass(frozen=True)
class MicroBatch:
    """A rank's micro-batch. num_recomputed: checkpointed layers of the language model. mlp_tokens: tokens per MLP tile,
    which is recomputed in backward; None if MLPs are not tiled.
    """

    num_tokens: int
    num_supervised: int
    num_tiles: int
    num_recomputed: int = 0
    mlp_tokens: int | None = None

    @property
    def has_tiled_mlps(self) -> bool:
        """True if MLPs are tiled, so that they save only their input."""
        return self.mlp_tokens is not None and self.mlp_tokens < self.num_tokens


def activation_bytes(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Return the peak bytes of a micro-batch besides model states; 0 if only the parameter count is known."""
    if shape.text is None or shape.tower is None:
        return 0
    text, w = shape.text, weight_bytes
    tokens = batch.num_tokens
    tiled = batch.has_tiled_mlps
    largest = text.largest_layer
    again = layer_bytes(largest, tokens, w, tiled) if batch.num_recomputed else 0  # bytes of the layer being recomputed
    saved, head = saved_bytes(shape, batch, w), head_bytes(text, batch, w) if shape.is_last else 0
    # A critic runs backward before the actor's loss, while the actor keeps all its saved tensors.
    below = saved if shape.has_critic else saved - head
    at_the_loss = head + (saved - head) // (2 if shape.has_critic else 1)
    at_the_loss += loss_bytes(text, batch.num_supervised, w) if shape.is_last else 0
    # By then, dropout's tensors for the MLP's first two matrices are already freed. So is the last matrix's input, if
    # matrices save inputs.
    gone = (w + 1) * (text.intermediate + text.hidden) if text.adapter_dropped else 0
    keeps_inputs = text.trained or text.adapter_rank > 0
    mlp = (5 if text.routed else 2 if keeps_inputs else 3) * largest.intermediate
    in_mlps = batch.mlp_tokens * (w * mlp + _mlp_bytes(largest, w)) if tiled else tokens * w * mlp
    # Norms run backward in fp32 after the MLPs. With experts, this term stands for copies of tokens. DoRA's forward
    # computes row norms from a matrix, the product B A and their sum.
    norms = tokens * 8 * text.hidden
    at_once = max(in_mlps + norms if text.routed else in_mlps, norms, 4 * w * text.adapter_read)
    in_a_layer = below + again + tokens * (w * 2 * text.hidden - gone) + at_once
    return max(at_the_loss, in_a_layer, _in_the_tower(shape, batch, w) if shape.is_first else 0)


def exchange_buffers(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Return the peak bytes of the exchange around attention: query, key and value as sent and as received."""
    if shape.text is None:
        return 0
    return 2 * exchanged_bytes(shape.text.largest_layer, batch.num_tokens, weight_bytes)[0]


def exchanged_bytes(text: TextShape, num_tokens: float, weight_bytes: int) -> tuple[int, int]:
    """Return the bytes that a rank exchanges before and after attention in one forward."""
    before = num_tokens * weight_bytes * (text.query + 2 * text.key + text.convolved + text.gated)
    return int(before), int(num_tokens * weight_bytes * (text.query + text.gated))


def saved_bytes(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Return the bytes saved between forward and backward."""
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
    """Return the bytes that one language-model layer saves. tiled: its MLP saves only its input."""
    w = weight_bytes
    keeps_inputs = text.trained or text.adapter_rank > 0
    normalised = (4 if text.fp32_norms else w) * text.trained
    norms = text.norms * text.hidden * (4 + normalised) + min(2, text.norms) * text.hidden * w * keeps_inputs
    if text.has_head_norms:
        norms += (text.query + text.key) * (4 + normalised)
    attention = (w * (2 * text.query + 2 * text.key) + 4 * text.num_heads) * (1 + text.in_blocks)
    # A frozen MLP saves no input, but recomputing its tiles needs it.
    mlp = w * text.hidden * (not keeps_inputs) if tiled else _mlp_bytes(text, w)
    adapters = w * text.adapter_rank + (w + 1) * text.adapter_dropped + 2 * w * text.adapter_scaled
    states = 2 * w * text.convolved + (12 + 3 * w) * text.gated
    embeddings = w * (text.hidden * keeps_inputs + 3 * text.layer_embedding) if text.layer_embedding else 0
    return int(num_tokens * (norms + attention + mlp + adapters + states + embeddings))


def _mlp_bytes(text: TextShape, weight_bytes: int) -> int:
    """Return the bytes that an MLP saves per token."""
    return (4 if text.trained or text.adapter_rank > 0 else 3) * weight_bytes * text.intermediate


def head_bytes(text: TextShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Return the bytes that the last norm, the output layer and the loss save."""
    w = weight_bytes
    norm = batch.num_tokens * text.hidden * (4 + (w if text.trained else 0))
    return norm + batch.num_supervised * w * text.hidden  # gradient of the hidden states, computed with the loss


def loss_bytes(text: TextShape, num_supervised: int, weight_bytes: int) -> int:
    """Return the peak bytes besides saved tensors while the loss and its gradients are computed."""
    w, rows = weight_bytes, min(num_supervised, chunk_rows(text.vocab, "cuda"))
    logits, gradients = rows * text.vocab, text.vocab * text.hidden
    softmax = (4 + w) * logits if w < 4 else 4 * logits
    if not text.trained:
        return softmax
    if rows == num_supervised:
        return max(softmax, w * (logits + gradients))
    # At the end, the sum over chunks is cast to the precision of the weights.
    return 4 * gradients + max(softmax, w * gradients if w < 4 else 0)


def _image_bytes(tower: TowerShape, batch: MicroBatch, recomputed: float, weight_bytes: int) -> int:
    """Return the bytes that the projector and a trained tower save. recomputed: share of the tower's layers."""
    features = batch.num_tiles * (tower.num_patches * tower.connector + tower.hidden) * weight_bytes
    if not tower.trained:
        return features
    again = math.ceil(recomputed * tower.num_layers)
    positions = batch.num_tiles * tower.num_positions
    inputs = again * positions * weight_bytes * tower.hidden
    return features + inputs + (tower.num_layers - again) * _tower_layer_bytes(tower, positions, weight_bytes)


def _tower_layer_bytes(tower: TowerShape, positions: int, weight_bytes: int) -> int:
    """Return the bytes that one layer of a trained tower saves."""
    return positions * (weight_bytes * tower.saved + 4 * tower.saved_fp32)


def _in_the_tower(shape: ModelShape, batch: MicroBatch, weight_bytes: int) -> int:
    """Return the peak bytes in the tower's forward, or in its backward if the tower is trained."""
    tower, w, positions = shape.tower, weight_bytes, batch.num_tiles * shape.tower.num_positions
    pixels = 3 * tower.image_size**2 * batch.num_tiles * (1 + 4 + 4 + w)
    own = pixels + w * positions * (3 * tower.hidden + 3 * tower.intermediate)
    if not tower.trained:
        return own
    own += _image_bytes(tower, batch, batch.num_recomputed / shape.text.num_layers, w)
    return own + (_tower_layer_bytes(tower, positions, w) if batch.num_recomputed else 0)
