"""Tokens that end an answer under a conversation template, and tokenizers that lack them."""

from transformers import PreTrainedTokenizerBase

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.data.templates import TEMPLATES, resolve_template

_NOT_TOKENS = ("\n", "###")  # end markers of old templates that are no tokens


def check_tokenizer(template: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Problems of training with a template (a key of TEMPLATES) and this tokenizer, a line each."""
    problems = []
    if template == "chat_template" and tokenizer.chat_template is None:
        problems.append(
            "--version chat_template takes the tokenizer's own template, but this one has none: give another --version"
        )
    if template == "processor" and _processors_end(tokenizer) is None:
        problems.append(
            "its chat template writes no special token behind an answer, so the model would never learn to stop: "
            "bring the instruction-tuned model's chat template"
        )
    rules = TEMPLATES[template]
    markers = [marker for marker in rules.end_markers if marker not in _NOT_TOKENS]
    for token in dict.fromkeys([*markers, *rules.learned]):
        if _single_id(tokenizer, token) is None:
            problems.append(
                f"--version {template} needs {token!r}, which is not one token of this tokenizer (its end marker is "
                f"{tokenizer.eos_token!r}), so the model would never learn to stop: give the --version that the "
                "language model was trained with, or chat_template"
            )
    return problems


def refuse_unfit_tokenizer(model: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError with the problems that check_tokenizer finds for these flags."""
    problems = check_tokenizer(resolve_template(model.version), tokenizer)
    if problems:
        raise ConfigError("\n".join(f"--model_name_or_path {model.model_name_or_path}: {p}" for p in problems))


def end_markers(template: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: the template's end markers that are one token, and the tokenizer's own."""
    markers = [_processors_end(tokenizer)] if template == "processor" else TEMPLATES[template].end_markers
    ids = [_single_id(tokenizer, marker) for marker in markers if marker is not None and marker not in _NOT_TOKENS]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _single_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    known = {added.content: i for i, added in tokenizer.added_tokens_decoder.items()}
    return known.get(token, None if token not in tokenizer.get_vocab() else tokenizer.convert_tokens_to_ids(token))


def _processors_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    from llava_ds.data.chat_template import answer_end  # renders templates, for ready models alone

    return answer_end(tokenizer)
