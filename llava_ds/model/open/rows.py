# V rows of the embedding and of the output layer, D language-model width
"""Resize embedding and output layer for added tokens, as LLaVA or as transformers does."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import ModelArguments, trained_parts, trains_projector_only
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.active import active
from llava_ds.model.families.language import has_layer_embeddings
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import Source, Sources, Weights
from llava_ds.tokenizer import add_image_tokens, num_rows

NUM_MARKS = 2  # <im_start> and <im_end>


@dataclass(frozen=True)
class Rows:
    """Plan for resizing the vocabulary.

    total: new number of rows; new: LLaVA's tokens, whose rows are the last ones and start as the mean of the others;
    inputs, outputs, layers: names of the parameters with a row per token (input embedding, weight and bias of the
    output layer, per-layer embeddings); before: number of rows that files must have, None for any number.
    """

    total: int
    new: tuple[str, ...]
    inputs: str
    outputs: tuple[str, ...]
    layers: tuple[str, ...] = ()
    before: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters with a row per token."""
        return frozenset((self.inputs, *self.outputs, *self.layers))


def plan_rows(config: PreTrainedConfig, total: int, new: tuple[str, ...] = (), before: int | None = None) -> Rows:
    """Plan the rows of a language model. new and before: see Rows."""
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [model.base_model.get_per_layer_input_embeddings()] if has_layer_embeddings(config) else []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Rows(
        total=total,
        new=new,
        inputs=names[id(inputs.weight)],
        outputs=tuple(names[id(parameter)] for parameter in outputs.parameters()),
        layers=tuple(names[id(each.weight)] for each in layers),
        before=before,
    )


class Resized:
    """A language model's weights with another number of vocabulary rows. New rows are the mean of the others.

    If rows.before is given, rows are only added, and new entries of the output layer's bias are the mean as well. If it
    is None, rows beyond the tokenizer's length are removed or used for new tokens, and the bias of new tokens is zero,
    as in LLaVA. learned: a projector file's weights, with trained rows of the new tokens. Raises DataError if the
    number of rows in the files is not rows.before.
    Source: LLaVA's initialize_vision_tokenizer, and transformers' resize_token_embeddings with mean_resizing.
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
                    f"only the {NUM_MARKS} rows of <im_start> and <im_end>, if these are new to its tokenizer"
                )
        each = rows.names & set(below.shapes)
        self._check_before(each - set(rows.layers))
        added = f", the last for {', '.join(rows.new)}, set to the mean of the others" if rows.new else ""
        if rows.before is not None:
            added = f", the last {rows.total - rows.before:,} of them new, set to the mean of the others"
        if self._learned is not None:
            added += f", but {NUM_MARKS} in the embedding from {learned.path}"
        self.notes = (*below.notes, f"{rows.total:,} rows of vocabulary{added}")
        self.shapes = {
            name: (rows.total, *shape[1:]) if name in each else shape for name, shape in below.shapes.items()
        }

    def _check_before(self, names: set[str]) -> None:
        before = self._rows.before
        for name in sorted(names):
            if before is not None and self._below.shapes[name][0] != before:
                raise DataError(
                    f"{self.path}: {name} has {self._below.shapes[name][0]:,} rows, and config.json says vocab_size "
                    f"{before}: correct config.json, or copy the folder again"
                )

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, read in self._below.tensors():
            if self.shapes[name] == self._below.shapes[name] and not self._rows.new:
                yield name, read
            elif name in self._rows.names:
                yield name, partial(self._resized, name, read)
            else:
                yield name, read

    def _resized(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        before = read()
        old = before[: self._rows.total - len(self._rows.new)]  # (V, D), or (V,)
        fresh = self._rows.total - len(old)
        if old.ndim == 1 and self._rows.before is None:
            return torch.cat([old, old.new_zeros(fresh)])
        mean = old.mean(0, dtype=torch.float32).to(old.dtype)
        resized = torch.cat([old, mean.expand(fresh, *old.shape[1:])])
        if name == self._rows.inputs and self._learned is not None:
            for found, learned in self._learned.tensors():
                if found == name:
                    resized[-NUM_MARKS:] = learned()[-NUM_MARKS:].to(resized.dtype)
        return resized


def add_rows(
    config: PreTrainedConfig, sources: Sources, tokenizer: PreTrainedTokenizerBase, args: ModelArguments
) -> tuple[PreTrainedConfig, Sources, list[str]]:
    """Add the tokens and rows that the flags request. For the result see fit_vocabulary."""
    marks = [name for name in ("mm_use_im_start_end", "mm_use_im_patch_token") if getattr(args, name)]
    added = add_image_tokens(tokenizer, args)
    if marks and args.resize_token_embeddings:
        raise ConfigError(
            f"--resize_token_embeddings True: --{marks[0]} True resizes the embedding to the tokenizer already, as in "
            "LLaVA: leave --resize_token_embeddings out"
        )
    if marks:
        return *_resize_as_llava(config, sources, tokenizer, added, args), []
    return _grow(config, sources, tokenizer, args)


def _resize_as_llava(
    config: PreTrainedConfig, sources: Sources, tokenizer: PreTrainedTokenizerBase, new: list[str], args: ModelArguments
) -> tuple[PreTrainedConfig, Sources]:
    rows = plan_rows(config, num_rows(tokenizer), tuple(new))
    given = args.pretrain_mm_mlp_adapter if args.mm_use_im_start_end else None
    new_rows = given and Source("--pretrain_mm_mlp_adapter", given, partial(_embedding, inputs=rows.inputs))
    learned = new_rows and new_rows.open()
    config, sources = _with_rows(config, sources, rows, learned)
    return config, dataclasses.replace(sources, new_rows=new_rows)


def _grow(
    config: PreTrainedConfig, sources: Sources, tokenizer: PreTrainedTokenizerBase, args: ModelArguments
) -> tuple[PreTrainedConfig, Sources, list[str]]:
    """Grow the vocabulary for --resize_token_embeddings. Rows are never removed."""
    before, needed, multiple = config.vocab_size, num_rows(tokenizer), args.pad_embeddings_to_multiple_of or 1
    total = -(-max(before, needed) // multiple) * multiple
    if total == before:
        line = (
            f"--resize_token_embeddings True adds no rows: the embedding has {before:,}, the tokenizer needs {needed:,}"
        )
        return config, sources, [line]
    config, sources = _with_rows(config, sources, plan_rows(config, total, before=before))
    padded = f", a multiple of {multiple}" if multiple > 1 else ""
    line = (
        f"--resize_token_embeddings True: {total:,} rows of embedding and output layer{padded}, {before:,} before; the "
        f"tokenizer needs {needed:,}; new rows start as the mean of the others"
    )
    return config, sources, [line]


def frozen_rows(model: nn.Module, args: ModelArguments) -> list[str]:
    """Return a warning if --resize_token_embeddings adds rows to parameters that other flags freeze, else []. model: a
    LlavaModel without weights."""
    if not args.resize_token_embeddings:
        return []
    language_model = model.language_model
    names = {id(parameter): name for name, parameter in language_model.named_parameters()}
    inputs, outputs = language_model.get_input_embeddings().weight, language_model.get_output_embeddings().weight
    ends = dict.fromkeys(names[id(end)] for end in (inputs, outputs))
    parts, trained = trained_parts(args), set()
    if "language_model" in parts and not args.unfreeze_topk_llm:
        for wrap in active(args.own).wraps:
            wrap.trains(model, args)
        trained = {names[id(parameter)] for parameter in language_model.parameters() if parameter.requires_grad}
        model.requires_grad_(True)
    elif "output_layer" in parts and outputs is not inputs:
        trained = {names[id(outputs)]}
    frozen = [name for name in ends if name not in trained]
    if not frozen:
        return []
    then = ", and the projector's file does not include them: give the flag again in the next stage"
    return [
        f"--resize_token_embeddings True: the flags leave {' and '.join(frozen)} frozen, so new rows stay at the mean "
        f"of the others{then if trains_projector_only(args) else ''}"
    ]


def _with_rows(
    config: PreTrainedConfig, sources: Sources, rows: Rows, learned: Weights | None = None
) -> tuple[PreTrainedConfig, Sources]:
    config = copy.deepcopy(config)
    config.vocab_size = rows.total
    if rows.layers:
        config.vocab_size_per_layer_input = rows.total
    source = sources.language_model
    source = dataclasses.replace(source, changes=(*source.changes, partial(Resized, rows=rows, learned=learned)))
    return config, dataclasses.replace(sources, language_model=source)


def _embedding(name: str, inputs: str) -> str | None:
    """Return `inputs`, the name of the input embedding, for the embedding's name in a projector file; else None."""
    return inputs if formats.plain_name(name) == inputs else None
