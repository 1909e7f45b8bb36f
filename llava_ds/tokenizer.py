"""Open tokenizers so that they give the same ids as in LLaVA's own code.

LLaVA trained with transformers 4.37: it uses sentencepiece if the folder has tokenizer.model (use_fast=False), and
otherwise tokenizer.json. transformers 5 rebuilds Llama's and Gemma's tokenizers by its own rules: it may omit the
first token, drop sentencepiece's space before a text, or split a text differently.
"""

import copy
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, TokenizersBackend

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IM_END_TOKEN, IM_PATCH_TOKEN, IM_START_TOKEN, SPACE, ConfigError
from llava_ds.files.model_files import check_folder, library_errors, own_file, read_config, read_json_if_there, shown

MAX_NAMED = 4  # maximum tokens named in one line
MAX_GAP = 1 << 16  # maximum number of ids without a token

# Classes that put bos before a text in transformers 4.37, unless tokenizer_config.json disables it. They ignore the
# post-processor in tokenizer.json.
_BEGINS_WITH_BOS = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"}
# Key that marks a tokenizer like LlamaTokenizer with legacy=False: it adds a space only at the start of the whole text.
_FIRST_SPACE_ONLY = "sentencepiece_first_space_only"
# Key in tokenizer_config.json of an export whose tokenizer adds no bos because the chat template writes it. The encoder
# treats such a tokenizer as if it added bos.
_WITHOUT_ITS_BOS = "llava_ds_without_its_bos"


def open_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Open a folder's tokenizer. Raises ConfigError if it is missing, or if it has no character offsets."""
    where = f"--model_name_or_path {path}"
    try:
        tokenizer = read_tokenizer(path, where)
    except ConfigError as error:
        if any((Path(path) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise
        raise ConfigError(
            f"{where}: the tokenizer can't be opened: no tokenizer.json or tokenizer.model found next to config.json: "
            "put the tokenizer's files there"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{where}: the tokenizer is a slow one, without character offsets: add its tokenizer.json")
    return as_llava(tokenizer)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of all special tokens, including tokens that the files only mark as special, such as Gemma's
    <end_of_turn>."""
    marked = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *marked]))


def read_template(folder: Path, where: str) -> str | None:
    """Return the content of a folder's chat_template.jinja; None if it is missing."""
    file = folder / "chat_template.jinja"
    if not file.is_file():
        return None
    with library_errors(where):
        return own_file(file).read_text(encoding="utf-8")


def read_tokenizer(path: str | Path, where: str) -> PreTrainedTokenizerBase:
    """Open the tokenizer of a folder in transformers' own class. where: the beginning of error messages."""
    check_folder(path, where)
    with library_errors(where, "the tokenizer can't be opened"):
        tokenizer = _auto_tokenizer(path, where)
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or longest < 1:
        raise ConfigError(
            f"{where}: tokenizer_config.json says model_max_length {shown(longest)}, expected a number of tokens: "
            "copy it again"
        )
    return tokenizer


def _auto_tokenizer(path: str | Path, where: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, use_fast=True)
    except AttributeError:
        # transformers 5.23 opens the config.json of an unknown model_type, such as LLaVA's, with its base class. That
        # fails for the rotary embeddings of Llama 3.1, YaRN and Phi-3.
        config = read_config(Path(path) / "config.json", where)
        rest = {key: value for key, value in config.items() if not key.startswith("rope_")}
        rest = PreTrainedConfig.from_dict(rest)
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_fast=True, config=rest
        )


def as_llava(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Rebuild a tokenizer from the files in its folder, to give the same ids as LLaVA's own code.

    A tokenizer that has no folder or is already rebuilt is returned unchanged.
    """
    folder = Path(tokenizer.name_or_path or "")
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if getattr(tokenizer, "_is_as_llava", False) or not any((folder / name).is_file() for name in files):
        return tokenizer
    with library_errors(str(folder), "the tokenizer can't be opened"):
        return _rebuilt(tokenizer, folder)


def _rebuilt(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    config = read_json_if_there(folder / "tokenizer_config.json", str(folder))
    proto = None
    if (folder / "tokenizer.model").is_file():
        from llava_ds.sentencepiece import backend_of, read_model

        proto = read_model(folder / "tokenizer.model")
    declared = str(config.get("tokenizer_class", type(tokenizer).__name__)).removesuffix("Fast")
    marks = {_WITHOUT_ITS_BOS: True} if config.get(_WITHOUT_ITS_BOS) is True else {}
    first_space_only = bool(config.get(_FIRST_SPACE_ONLY, False))
    if proto is not None:
        # The default of legacy is True in 4.37 and False in transformers 5.
        first_space_only |= declared in ("LlamaTokenizer", "CodeLlamaTokenizer") and config.get("legacy") is False
        backend = backend_of(tokenizer, proto, folder, config, first_space_only)
    elif (folder / "tokenizer.json").is_file():
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        _add_missing(backend, tokenizer)
    else:
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    if declared in _BEGINS_WITH_BOS:
        # transformers 5 writes these flags even if they have their class's defaults, as false or null.
        bos = tokenizer.bos_token if config.get("add_bos_token") in (True, None) else None
        eos = tokenizer.eos_token if config.get("add_eos_token") else None
        backend.post_processor = _framing(backend, bos, eos)
    elif backend.post_processor is None:
        backend.post_processor = _framing(backend, None, None)
    if first_space_only:
        marks[_FIRST_SPACE_ONLY] = True
    return _wrapped(tokenizer, backend, marks)


def framing_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that training puts before and after every text, as the tokenizer does."""
    if tokenizer.init_kwargs.get(_WITHOUT_ITS_BOS) is True and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id], []
    where = f"the tokenizer of {tokenizer.name_or_path}"
    with library_errors(where, "it can't tokenize a text"):
        coded = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    inner = [i for i, special in enumerate(coded.special_tokens_mask) if not special]
    if not inner:
        raise ConfigError(f"{where} makes no tokens of 'a': use another model")
    return coded.ids[: inner[0]], coded.ids[inner[-1] + 1 :]


def begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if training adds bos before every text, and nothing else."""
    return tokenizer.bos_token_id is not None and framing_ids(tokenizer) == ([tokenizer.bos_token_id], [])


def leave_bos_to_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Stop a tokenizer from adding bos, and record that for its files. Call it only if begins_with_bos is True."""
    tokenizer.backend_tokenizer.post_processor = _framing(tokenizer.backend_tokenizer, None, None)
    tokenizer.init_kwargs |= {_WITHOUT_ITS_BOS: True, "add_bos_token": False}


def add_image_tokens(tokenizer: PreTrainedTokenizerBase, args: ModelArguments) -> list[str]:
    """Append the missing tokens of --mm_use_im_patch_token and --mm_use_im_start_end, and return them.

    Source: LLaVA's initialize_vision_tokenizer.
    """
    wanted = [IM_PATCH_TOKEN] if args.mm_use_im_patch_token else []
    wanted += [IM_START_TOKEN, IM_END_TOKEN] if args.mm_use_im_start_end else []
    if not wanted:
        return []
    known = tokenizer.get_vocab()
    missing = [token for token in wanted if token not in known]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    return missing


def num_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of embedding rows for all ids: the tokenizer's length, or more if its largest id is larger.

    Raises ConfigError if more than MAX_GAP rows would have no token, because they could fill the memory.
    """
    count, last = len(tokenizer), max(tokenizer.get_vocab().values())
    if last > count + MAX_GAP:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has {count:,} tokens and the id {last:,}: an embedding would "
            "have a row for every id between: correct its files"
        )
    return max(count, last + 1)


def note_rows(tokenizer: PreTrainedTokenizerBase, rows: int, leaving_out: tuple[str, ...] = ()) -> None:
    """Store the number of rows of the model's embedding in a tokenizer, from where encoders can read it.

    leaving_out: tokens whose ids may be beyond the rows, because features replace them.
    """
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows and token not in leaving_out}
    tokenizer._embedding_rows = (rows, dict(sorted(beyond.items()))) if beyond else None


def rows_noted(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of rows that note_rows stored if the tokenizer has ids beyond them; None if all ids have a
    row, or if note_rows was not called."""
    noted = getattr(tokenizer, "_embedding_rows", None)
    return None if noted is None else noted[0]


def tokens_without_rows(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a line about the tokens that have no row in the model's embedding (see note_rows); [] if all have."""
    if rows_noted(tokenizer) is None:
        return []
    rows, beyond = tokenizer._embedding_rows
    named = ", ".join(f"{token!r:.80} (id {i})" for i, token in list(beyond.items())[:MAX_NAMED])
    rest = f" and {len(beyond) - MAX_NAMED:,} more" if len(beyond) > MAX_NAMED else ""
    return [
        f"tokens of the tokenizer without one of the {rows:,} rows of the model's embedding: {named}{rest}: a text "
        "that spells one is refused; training with --resize_token_embeddings True adds rows"
    ]


def first_space_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern | None:
    """Return a pattern for texts before which a space has to be added to get LLaVA's ids; None if never.

    With legacy=False, transformers 4.37 adds a space before every text that does not begin with a special token. The
    tokenizers library adds none if the text begins with a space or an added token.
    """
    if not tokenizer.init_kwargs.get(_FIRST_SPACE_ONLY, False):
        return None
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
    return re.compile("|".join(map(re.escape, [" ", SPACE, *added])))


def _add_missing(backend: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the tokens that only the folder's other files have, in the order of their ids."""
    known = backend.get_vocab(with_added_tokens=True)
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.content not in known:
            backend.add_tokens([token])


def _framing(backend: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    first, last = (f"{bos} " if bos else ""), (f" {eos}" if eos else "")
    return processors.TemplateProcessing(
        single=f"{first}$A{last}",
        pair=f"{first}$A{last} {first.strip() + ':1 ' if bos else ''}$B:1{last.rstrip() + ':1' if eos else ''}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (bos, eos) if token],
    )


def _split_at_spaces(backend: Tokenizer) -> None:
    """Make a backend apply merges word by word, many times faster, if no token extends into the next word."""
    state = json.loads(backend.to_str())
    model, scheme = state["model"], state["pre_tokenizer"] or {}
    alone = scheme.get("type") == "Metaspace" and not scheme.get("split", True)
    if model["type"] != "BPE" or (state["normalizer"] is None and not alone) or (state["pre_tokenizer"] and not alone):
        return
    if SPACE not in model["vocab"] or any(SPACE in token.lstrip(SPACE) for token in model["vocab"]):
        return
    words = pre_tokenizers.Split(Regex(f"{SPACE}+[^{SPACE}]*"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, words]) if alone else words


def _wrapped(tokenizer: PreTrainedTokenizerBase, backend: Tokenizer, marks: dict[str, bool]) -> TokenizersBackend:
    """Wrap a backend in transformers' generic class: it does not rebuild it. marks: this project's keys for
    tokenizer_config.json."""
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    vocab = backend.get_vocab(with_added_tokens=True)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = [token for token in tokenizer.all_special_tokens if token in added - set(named.values())]
    wrapped = TokenizersBackend(
        tokenizer_object=backend,
        **{name: token for name, token in named.items() if token in vocab},
        extra_special_tokens=extra,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        clean_up_tokenization_spaces=False,
        name_or_path=tokenizer.name_or_path,
        **marks,
    )
    wrapped.chat_template = tokenizer.chat_template
    wrapped._is_as_llava = True
    return wrapped


def copy_of_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Copy a tokenizer's backend, without padding, truncation, and the tokens that it adds before and after a text."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    backend.post_processor = _framing(backend, None, None)
    _split_at_spaces(backend)
    return backend


def with_token(backend: Tokenizer, text: str) -> Tokenizer:
    """Copy a backend, and add a text as a special token to the copy."""
    backend = copy.deepcopy(backend)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    return backend
