# V rows of the embedding and of the output layer, D language-model width
"""Rows for added tokens: embedding and output layer are resized as in LLaVA."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import DataError
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import Source, Sources, Weights

NUM_MARKS = 2  # <im_start> and <im_end>


@dataclass(frozen=True)
class Rows:
    """Rows of the vocabulary, and the new ones among them.

    inputs, outputs: names of the parameters with a row per token, the output layer's weight and perhaps bias; new:
    tokens of the last rows, which start as the mean of the rows before.
    """

    total: int
    new: tuple[str, ...]
    inputs: str
    outputs: tuple[str, ...]


def num_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of rows that LLaVA resizes to: the tokenizer's length, but at least what its ids need."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def plan_rows(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, new: list[str]) -> Rows:
    """The rows of a language model for a tokenizer with new tokens."""
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Rows(
        total=num_rows(tokenizer),
        new=tuple(new),
        inputs=names[id(inputs.weight)],
        outputs=tuple(names[id(parameter)] for parameter in outputs.parameters()),
    )


class Resized:
    """A language model's weights with another number of rows; new ones are the mean of the others.

    Rows beyond the tokenizer's are cut off, or become the new tokens', as in LLaVA. A bias of the output layer is zero
    for new tokens. learned: new rows of the embedding from a projector's file.
    Source: LLaVA's initialize_vision_tokenizer.
    """

    def __init__(self, below: Weights, *, rows: Rows, learned: Weights | None = None) -> None:
        self.path, self._below, self._rows = below.path, below, rows
        self._learned = None
        if learned is not None and rows.inputs in learned.shapes:
            self._learned = learned
            shape = learned.shapes[rows.inputs]
            width = below.shapes[rows.inputs][1:]
            if shape[1:] != width or shape[0] not in (rows.total, NUM_MARKS) or len(rows.new) < NUM_MARKS:
                raise DataError(
                    f"{learned.path} holds an embedding of shape {shape}, the model needs {(rows.total, *width)}, or "
                    f"the {NUM_MARKS} rows of <im_start> and <im_end> alone, which have to be new to its tokenizer"
                )
        each = {rows.inputs, *rows.outputs} & set(below.shapes)
        added = f", the last for {', '.join(rows.new)}, as the mean of the others" if rows.new else ""
        if self._learned is not None:
            added += f", but {NUM_MARKS} in the embedding from {learned.path}"
        self.notes = (*below.notes, f"{rows.total:,} rows of vocabulary{added}")
        self.shapes = {
            name: (rows.total, *shape[1:]) if name in each else shape for name, shape in below.shapes.items()
        }

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, read in self._below.tensors():
            if self.shapes[name] == self._below.shapes[name] and not self._rows.new:
                yield name, read
            elif name == self._rows.inputs or name in self._rows.outputs:
                yield name, partial(self._resized, name, read)
            else:
                yield name, read

    def _resized(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        before = read()
        old = before[: self._rows.total - len(self._rows.new)]  # (V, D), or (V,)
        fresh = self._rows.total - len(old)
        if old.ndim == 1:
            return torch.cat([old, old.new_zeros(fresh)])
        mean = old.mean(0, dtype=torch.float32).to(old.dtype)
        resized = torch.cat([old, mean.expand(fresh, -1)])
        if name == self._rows.inputs and self._learned is not None:
            for found, learned in self._learned.tensors():
                if found == name:
                    resized[-NUM_MARKS:] = learned()[-NUM_MARKS:].to(resized.dtype)
        return resized


def resize_vocabulary(
    config: PreTrainedConfig, sources: Sources, tokenizer: PreTrainedTokenizerBase, new: list[str], args: ModelArguments
) -> tuple[PreTrainedConfig, Sources]:
    """Resize the vocabulary in configuration and sources of a language model to a tokenizer with new tokens."""
    rows = plan_rows(config, tokenizer, new)
    given = args.pretrain_mm_mlp_adapter if args.mm_use_im_start_end else None
    new_rows = given and Source("--pretrain_mm_mlp_adapter", given, partial(_embedding, inputs=rows.inputs))
    learned = new_rows and new_rows.open()
    config = copy.deepcopy(config)
    config.vocab_size = rows.total
    source = sources.language_model
    source = dataclasses.replace(source, changes=(*source.changes, partial(Resized, rows=rows, learned=learned)))
    return config, dataclasses.replace(sources, language_model=source, new_rows=new_rows)


def _embedding(name: str, inputs: str) -> str | None:
    """The embedding's name for its tensor in a projector's file; None for others."""
    return inputs if formats.plain_name(name) == inputs else None
