"""Tokens that end an answer under a conversation template, and tokenizers that lack them."""

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.templates import TEMPLATES, resolve_template

if TYPE_CHECKING:
    from llava_ds.data.chat_template import AnswerEnd

_NOT_TOKENS = ("\n", "###")  # end markers of old templates that take several tokens


def check_tokenizer(template: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List the problems of training with a template (a key of TEMPLATES) and this tokenizer, one per line."""
    problems = []
    if template == "chat_template" and tokenizer.chat_template is None:
        problems.append(
            "--version chat_template takes the tokenizer's own template, but this one has none: give another --version"
        )
    elif TEMPLATES[template].write is None:
        problems += _endless(template, tokenizer)
    rules = TEMPLATES[template]
    markers = [marker for marker in rules.end_markers if marker not in _NOT_TOKENS]
    for token in dict.fromkeys([*markers, *rules.learned]):
        if _single_id(tokenizer, token) is None:
            problems.append(
                f"--version {template} needs {token!r} as one token, but this tokenizer has none (its end marker is "
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
    """Ids that end an answer: the template's end markers that are single tokens, and the tokenizer's eos token."""
    ids = [_single_id(tokenizer, marker) for marker in TEMPLATES[template].end_markers if marker not in _NOT_TOKENS]
    if TEMPLATES[template].write is None and (end := _own_end(template, tokenizer)) is not None:
        ids.append(end.id)
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _single_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    known = {added.content: i for i, added in tokenizer.added_tokens_decoder.items()}
    return known.get(token, None if token not in tokenizer.get_vocab() else tokenizer.convert_tokens_to_ids(token))


def _own_end(template: str, tokenizer: PreTrainedTokenizerBase, variables: str = "") -> "AnswerEnd | None":
    """Find the end of an answer in the tokenizer's own template; None if the template can't write a conversation (every
    record reports that)."""
    from llava_ds.data.chat_template import answer_end  # only for own templates

    try:
        return answer_end(tokenizer, template == "processor", variables)
    except DataError:
        return None


def endless(template: str, tokenizer: PreTrainedTokenizerBase, variables: str = "") -> str:
    """Describe the problem if the tokenizer's own template ends answers without a stop token to learn; "" if fine.
    variables: template variables as a JSON object."""
    end = _own_end(template, tokenizer, variables)
    if end is None or end.token is not None:
        return ""
    return (
        f"for an answer 'y', the model would learn {end.learned!r} (then follows {end.behind!r}): no special token "
        f"ends it, such as {tokenizer.eos_token!r}, so the model would never learn to stop"
    )


def _endless(template: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Describe the problem of a model's own template, with remedies."""
    other = ", or give --version one of LLaVA's templates" if template == "chat_template" else ""
    helps = (
        "use the instruction-tuned model's chat template, or one that ends answers with such a token (inside "
        f"{{% generation %}}, where it marks them){other}"
    )
    return [f"{fault}: {helps}" for fault in [endless(template, tokenizer)] if fault]
