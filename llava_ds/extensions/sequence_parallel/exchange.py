# s ranks that share a pack's tokens, T tokens of the pack, t = T / s of them on a rank, H query heads, K key heads,
# E head width
"""Exchange all heads of some tokens for some heads of all tokens, around attention under sequence parallelism.

A rank computes attention for some heads over all tokens of the pack, and everything else for some tokens, like
DeepSpeed-Ulysses (arXiv 2309.14509). Gradients are exchanged in reverse.
"""

import torch

Group = torch.distributed.ProcessGroup


class _AllToAll(torch.autograd.Function):
    """Send part i of (s, ...) to rank i; returns the received parts, in rank order."""

    @staticmethod
    def forward(ctx, parts: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        # empty_like would keep the strides of a transposed tensor, and scramble heads.
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(upstream, ctx.group), None


@torch.compiler.disable
def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange all heads of this rank's tokens for this rank's heads of all tokens.

    query (1, H, t, E) becomes (1, H / s, T, E); key and value (1, K, t, E) become (1, K / s, T, E), or (1, 1, T, E) if
    several ranks share a key head because K < s. See heads_problem for the supported numbers.
    """
    ranks = torch.distributed.get_world_size(group)
    if key.shape[1] < ranks:
        key, value = (x.repeat_interleave(ranks // x.shape[1], 1) for x in (key, value))
    parts = [x[0].unflatten(0, (ranks, -1)) for x in (query, key, value)]  # (s, heads / s, t, E)
    if query.shape[-1] == value.shape[-1]:  # one collective instead of three
        found = _AllToAll.apply(torch.cat(parts, 1), group).split([part.shape[1] for part in parts], 1)
    else:
        found = [_AllToAll.apply(part, group) for part in parts]
    return tuple(x.transpose(0, 1).flatten(1, 2)[None] for x in found)


@torch.compiler.disable
def to_tokens(out: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange this rank's heads of all tokens (1, T, H / s, E) for all heads of this rank's tokens (1, t, H, E)."""
    ranks = torch.distributed.get_world_size(group)
    found = _AllToAll.apply(out[0].unflatten(0, (ranks, -1)), group)  # (s, t, H / s, E)
    return found.transpose(0, 1).flatten(1, 2)[None]


class ColumnExchange:
    """The exchange around other layers that mix tokens by head. Heads are equal parts of a tensor's columns."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size, self.index = (f(group) for f in (torch.distributed.get_world_size, torch.distributed.get_rank))

    def all_tokens(self, *parts: torch.Tensor) -> torch.Tensor:
        """Exchange parts (1, t, n) for this rank's n / s columns of each, of all tokens, side by side: (1, T, sum)."""
        sent = torch.cat([part[0].unflatten(1, (self.size, -1)) for part in parts], -1)  # (t, s, sum)
        return _AllToAll.apply(sent.transpose(0, 1), self.group).flatten(0, 1)[None]

    def own_tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's columns of all tokens (1, T, n / s) for all columns of its tokens (1, t, n)."""
        received = _AllToAll.apply(columns[0].unflatten(0, (self.size, -1)), self.group)  # (s, t, n / s)
        return received.transpose(0, 1).flatten(1)[None]


def heads_problem(num_heads: int, num_key_heads: int, ranks: int) -> str | None:
    """Return the reason why heads can't be divided over the ranks; None if they can."""

    def divides(number: int) -> bool:
        return num_heads % number == 0 and (num_key_heads % number == 0 or number % num_key_heads == 0)

    if divides(ranks):
        return None
    sizes = ", ".join(str(number) for number in range(1, num_heads + 1) if divides(number))
    return f"{num_heads} heads, with {num_key_heads} of keys, can't be divided over {ranks} ranks: give {sizes}"
