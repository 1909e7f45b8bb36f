# P parameters, T trained ones, N ranks, w bytes per weight, m micro-batches per optimizer step
"""Estimate the bytes that a rank sends in an optimizer step, by ZeRO stage and offload, as DeepSpeed 0.19 sends them.

Between ranks, in rings: an all-reduce of S bytes sends 2 S (N - 1) / N, a reduce-scatter or an all-gather half of it.

    stage   in forward     in backward                                  after the last backward
    0                                                                   all-reduce of wT
    1                      (with overlap_comm: all-reduce of wT, once)  all-reduce of wT; all-gather of wT
    2                      all-reduce of wT, m times                    all-gather of wT
    3       gather, m      gather and reduce-scatter of wT, m times

Stages 1 and 2 do not reduce-scatter: each bucket is all-reduced, and each rank copies its part out
(use_multi_rank_bucket_allreduce, true by default; stage_1_and_2.py, average_tensor). Stages 0 and 1 send gradients only
at the last micro-batch of a step, 2 and 3 at every one.

Stage 3 gathers all weights above stage3_param_persistence_threshold in forward. In backward it gathers again those that
gradients flow through, except the last ones of forward, kept by stage3_max_reuse_distance. The embedding and a frozen
output layer are not gathered again: the loss also computes the output layer's gradients. Checkpointed layers are
recomputed with the weights that backward needs anyway. tests/distributed/test_traffic.py counts this on real ranks.

To the CPU, over PCIe: with offload_optimizer, a rank's wT/N of gradients at every micro-batch (and back, to add the
next), 4T/N at the last one, and wT/N of updated weights back; with offload_param, a rank's part of the weights before
each gather.
"""

from dataclasses import dataclass

from llava_ds.extensions.planning.activations import exchanged_bytes
from llava_ds.extensions.planning.memory import Setup, ZeroPlacement
from llava_ds.extensions.planning.shapes import UNEVEN, ModelShape, TextShape


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in an optimizer step: to other ranks in forward, in backward and after it, and over PCIe.

    backward_micro_steps: number of micro-batches that send in backward. can_overlap: True if DeepSpeed computes while
    sending. exchanged: bytes sent inside layers to ranks that share samples; layers wait for this traffic.
    """

    forward: float
    backward: float
    after: float
    backward_micro_steps: int
    can_overlap: bool
    pcie: float = 0.0
    pcie_after: float = 0.0
    exchanged: float = 0.0

    @property
    def total(self) -> float:
        """Bytes sent to other ranks."""
        return self.forward + self.backward + self.after + self.exchanged


def exchange_traffic(text: TextShape, setup: Setup, tokens: float, recomputed: int) -> float:
    """Return the bytes that a rank sends to ranks that share its samples, in one micro-batch.

    tokens: of the rank. recomputed: number of checkpointed layers, whose forward runs twice. Sequence parallelism sends
    as much in backward as in forward. Tensor parallelism sums a layer's T D elements twice in forward and five times in
    backward, once per matrix (module_inject/layers.py). Expert parallelism sends tokens to their experts' ranks and
    results back, in forward and backward, including rows left empty by an uneven load.
    """
    sent = (setup.sp - 1) / setup.sp * sum(exchanged_bytes(text, tokens, setup.weight_bytes))
    added = 2 * (setup.tp - 1) / setup.tp * tokens * text.hidden * setup.weight_bytes
    routed = (setup.ep - 1) / setup.ep * UNEVEN * tokens * text.expert_rows * text.hidden * setup.weight_bytes
    routed *= 4 + 2 * recomputed / text.num_layers
    return routed + sent * (2 * text.num_layers + recomputed) + added * (7 * text.num_layers + 2 * recomputed)


def step_traffic(shape: ModelShape, placement: ZeroPlacement, setup: Setup, micro_steps: int) -> Traffic:
    """Return the traffic of an optimizer step with this many micro-batches."""
    part, w, overlaps = (setup.ranks - 1) / setup.ranks, setup.weight_bytes, setup.zero.overlap_comm
    once = part * w * shape.trained_of_rank  # an all-gather or reduce-scatter of the trained part
    if placement.stage == 0:
        return Traffic(0, 0, 2 * once, 1, can_overlap=False)
    pcie, pcie_after = _pcie_bytes(shape, placement, setup, micro_steps)
    if placement.stage == 1:
        in_backward, after = (2 * once, once) if overlaps else (0, 3 * once)
        return Traffic(0, in_backward, after, 1, overlaps, pcie, pcie_after)
    if placement.stage == 2:
        return Traffic(0, micro_steps * 2 * once, once, micro_steps, overlaps, pcie, pcie_after)
    forward, backward = (part * n for n in gathered_bytes(shape, setup))
    return Traffic(micro_steps * forward, micro_steps * (backward + once), 0, micro_steps, overlaps, pcie, pcie_after)


def gathered_bytes(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Return the bytes of all weights that stage 3 gathers for one micro-batch, in forward and in backward."""
    zero, w = setup.zero, setup.weight_bytes
    large = sum(size for size in shape.tensors if size > zero.param_persistence_threshold)
    packed = sum(shape.packed) * shape.packed_bits / 8
    elements = large + packed / w
    again = max(0.0, elements - _gathered_once(shape))
    kept = min(again, zero.max_reuse_distance / 2)  # backward starts with the weights that forward used last
    return w * elements, w * (again - kept)


def _gathered_once(shape: ModelShape) -> int:
    """Count weights that backward doesn't gather again: a frozen tower, the embedding, a frozen output layer."""
    if shape.text is None or shape.tower is None:
        return 0
    text, tower = shape.text, shape.tower
    ends = 1 if text.tied else 2
    unused = ends - text.trained  # a trained output layer's weight is gathered again
    return unused * text.vocab * text.hidden + (0 if tower.trained else tower.num_parameters)


def _pcie_bytes(shape: ModelShape, placement: ZeroPlacement, setup: Setup, micro_steps: int) -> tuple[float, float]:
    """Return the bytes between a rank and its CPU: during micro-batches, and after the last one."""
    w, ranks = setup.weight_bytes, setup.ranks
    owned = shape.trained_of_rank / ranks
    during = after = 0.0
    if placement.optimizer != "none":
        accumulated = (2 * micro_steps - 1) * w * owned if micro_steps > 1 or placement.stage == 3 else 0.0
        during += accumulated + 4 * owned
        after += w * owned if placement.param == "none" else 0.0
    if placement.param != "none":
        during += micro_steps * sum(gathered_bytes(shape, setup)) / ranks
    return during, after
