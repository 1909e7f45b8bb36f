# T tokens of a pack, D language-model width
"""VoCo-LLaMA: compression tokens behind an image are all that the text sees of it.

The idea of VoCo-LLaMA (arXiv 2406.12275): a few tokens follow the image and attend to it; text attends to them and not
to the image, so the language model learns to distil the image into them. Written from the paper. The compression tokens
are marks in the text, as in "<image>\\n<voco><voco>\\nWhat is this?": one token of the vocabulary, whose embedding is
learned apart. A record without marks keeps plain attention. Answers of transformers' class see the image.

    --plugin examples/plugins/voco_llama.py --voco_mark "<voco>"
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.config.bounds import Positive
from llava_ds.config.flags import flags_of
from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension, ExtensionFlags
from llava_ds.extensions.plugins.attention_rule import AttentionRule

_voco, _ = flags_of("voco_llama")
TEXT, IMAGE, VOCO = range(3)


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the compression tokens."""

    voco_mark: str | None = _voco(None, "The token of the vocabulary that stands for a compression token.")
    voco_learning_rate: Positive | None = _voco(None, "Learning rate of its embedding. Absent: --learning_rate.")

    @property
    def module_rate(self) -> float | None:
        return self.voco_learning_rate

    def problems(self, args) -> Iterator[str]:
        if self.voco_mark is None:
            yield "--voco_mark is missing: give a token of the vocabulary"


class Compression(nn.Module):
    """The embedding of a compression token, (n,) zeros to (n, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, zeros: torch.Tensor) -> torch.Tensor:
        return self.embedding(zeros)


def compression(text_config, tower, args) -> nn.Module:
    return Compression(text_config.hidden_size)


class Distilled(AttentionRule):
    """Text sees compression tokens and not the image before them."""

    def marks(self, batch: Batch) -> torch.Tensor:
        is_voco = batch.input_ids[0] == self.number
        found = torch.zeros_like(batch.input_ids[0]).masked_fill(is_voco, VOCO)
        found[batch.placing.positions] = IMAGE
        sums = nn.functional.pad(is_voco.cumsum(0), (1, 0))[batch.cu_seqlens.long()]
        has_voco = (sums.diff() > 0).repeat_interleave(batch.cu_seqlens.diff())
        return found * has_voco  # samples without a compression token are all text

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ~((query == TEXT) & (key == IMAGE))

    def built(self, model) -> None:
        mark, words = self.plan.args.own["voco_llama"].voco_mark, self.plan.model.tokenizer.get_vocab()
        if mark not in words:
            raise ConfigError(f"--voco_mark {mark} is no token of the vocabulary: give one, like '#'")
        self.number, plain = words[mark], model.begin

        def begin(batch: Batch):
            embeds, options = plain(batch)  # (1, T, D)
            at = (batch.input_ids[0] == self.number).nonzero()[:, 0]
            learned = model.own_voco_llama(torch.zeros_like(at)).to(embeds.dtype)
            return embeds.index_copy(1, at, learned[None]), options

        model.begin = begin
        super().built(model)


extension = Extension(module=compression, part=Distilled)
