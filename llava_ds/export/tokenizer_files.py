"""Write a tokenizer's files so that transformers 5, transformers 4 and LLaVA's own code can read them."""

import copy
import json
import shutil
from pathlib import Path

from tokenizers import Regex, normalizers
from transformers import AddedToken, GenerationConfig, PreTrainedTokenizerBase

from llava_ds.constants import IM_END_TOKEN, IM_PATCH_TOKEN, IM_START_TOKEN, IMAGE_TOKEN, ConfigError
from llava_ds.data.end_markers import end_markers
from llava_ds.data.templates import resolve_template
from llava_ds.files.model_files import check_folder, library_errors, own_file, read_json_if_there
from llava_ds.tokenizer import begins_with_bos, leave_bos_to_template, read_tokenizer

VIDEO_TOKEN = "<video>"
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens")
# Tokens that an export adds, or that LLaVA's own code adds.
TOKENS_OF_IMAGES = (IMAGE_TOKEN, VIDEO_TOKEN, IM_PATCH_TOKEN, IM_START_TOKEN, IM_END_TOKEN)
ORIGINAL_FILES = "llava_tokenizer"  # folder for the original files, without the tokens that an export adds

# Name in transformers 5 of the class for any tokenizer.json, and its name in version 4.
CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}


def hf_tokenizer(
    tokenizer: PreTrainedTokenizerBase, tokens: tuple[str, ...], template_is_ours: bool = True
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Return a copy of a tokenizer for transformers' processors, and the tokens that were added to it.

    The copy pads on the left, with LLaVA's padding token if it has none. template_is_ours: True if this project's chat
    template writes bos. The copy then adds none, so a text has one bos even if a program adds special tokens.
    """
    tokenizer = copy.deepcopy(tokenizer)
    new = [token for token in tokens if token not in tokenizer.get_vocab()]
    if new:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in new])
    if tokenizer.pad_token is None:  # batches of prompts need a padding token; LLaVA uses <unk>
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    if template_is_ours and begins_with_bos(tokenizer):
        leave_bos_to_template(tokenizer)
    _keep_space_after_image(tokenizer)
    return tokenizer, new


def _keep_space_after_image(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer add a dummy space before a line break that follows <image>, as in training.

    transformers 5's Llama tokenizer adds it only before the first piece of a text; training tokenizes each piece alone.
    """
    backend = tokenizer.backend_tokenizer
    if getattr(backend.pre_tokenizer, "prepend_scheme", None) == "first":
        rule = normalizers.Replace(Regex(r"\A\n"), " \n")
        backend.normalizer = rule if backend.normalizer is None else normalizers.Sequence([backend.normalizer, rule])


def write_hf_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path, output_dir: Path) -> None:
    """Write a tokenizer for transformers 5 and 4, and copy the original files of the source folder."""
    with library_errors(str(source), "the tokenizer can't be written for transformers"):
        tokenizer.save_pretrained(output_dir)
        _readable_by_4(output_dir)
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if value}
    write_json(output_dir / "special_tokens_map.json", special)
    if (source / "tokenizer.model").is_file():
        own_file(source / "tokenizer.model")
        shutil.copy(source / "tokenizer.model", output_dir)
    origin = _original_folder(source)
    check_folder(origin, str(origin))
    _copy_files(origin, output_dir / ORIGINAL_FILES)


def write_llava_tokenizer(source: Path, output_dir: Path, max_length: int) -> str | None:
    """Write a folder's tokenizer as LLaVA's scripts do, without the tokens that an export added.

    Returns the padding token, or None.
    """
    origin = _original_folder(source)
    check_folder(origin, str(origin))
    _copy_files(origin, output_dir)
    path = output_dir / "tokenizer_config.json"
    with library_errors(str(origin), "the tokenizer's files can't be written for LLaVA"):
        _readable_by_4(output_dir)
        _merges_as_texts(output_dir / "tokenizer.json")
    config = read_json_if_there(path, str(origin))
    write_json(path, config | {"model_max_length": max_length, "padding_side": "right"})
    special = output_dir / "special_tokens_map.json"
    if not special.is_file():
        write_json(special, {name: config[name] for name in SPECIAL if config.get(name)})
    pad = config.get("pad_token")
    return pad["content"] if isinstance(pad, dict) else pad


def write_variables(tokenizer: PreTrainedTokenizerBase, output_dir: Path) -> None:
    """Write a tokenizer's chat template if it begins with default values of its variables.

    The template is removed from the folder's other files.
    """
    from llava_ds.template_variables import split_defaults

    template = tokenizer.chat_template
    if not isinstance(template, str) or not split_defaults(template)[0]:
        return
    (output_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    (output_dir / "chat_template.json").unlink(missing_ok=True)
    for name in ("processor_config.json", "tokenizer_config.json", "preprocessor_config.json"):
        content = read_json_if_there(output_dir / name, str(output_dir))
        if content.pop("chat_template", None) is not None:
            write_json(output_dir / name, content)


def refuse_lost_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if an export in LLaVA's format would lose tokens.

    LLaVA's format uses the original tokenizer from before an export, so tokens added to the export later are missing.
    """
    source = Path(tokenizer.name_or_path)
    origin = _original_folder(source)
    if origin == source:
        return
    known = {*read_tokenizer(origin, str(origin)).get_vocab(), *TOKENS_OF_IMAGES}
    lost = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda one: one[1]) if token not in known]
    if lost:
        raise ConfigError(
            f"LLaVA's format takes its tokenizer from {origin}, but {len(lost)} tokens of {source} are missing there "
            f"(such as {lost[0]!r}): keep transformers' format (hf), or add them to the model's folder from before "
            "its export"
        )


def write_generation_config(
    version: str, tokenizer: PreTrainedTokenizerBase, output_dir: Path, pad_token_id: int | None
) -> None:
    """Write generation_config.json, in which the end markers of the template (or tokenizer) end an answer."""
    ends = end_markers(resolve_template(version), tokenizer)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends,
        pad_token_id=pad_token_id,
    ).save_pretrained(output_dir)


def _original_folder(source: Path) -> Path:
    originals = source / ORIGINAL_FILES
    return originals if originals.is_dir() and originals.resolve().parent == source.resolve() else source


def _copy_files(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def _readable_by_4(folder: Path) -> None:
    """Change a tokenizer_config.json written by transformers 5, so that version 4 can read it."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") in CLASSES:
        config["tokenizer_class"] = CLASSES[config["tokenizer_class"]]
    if isinstance(config.get("extra_special_tokens"), list):  # transformers 4 expects a mapping
        extra = config.pop("extra_special_tokens")
        config["additional_special_tokens"] = [*config.get("additional_special_tokens", []), *extra]
    write_json(path, config)


def _merges_as_texts(path: Path) -> None:
    """Write merges as text, for the tokenizers library of transformers 4.37, unless a token contains a space."""
    if not path.is_file():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    merges = content["model"].get("merges") or []
    if merges and all(isinstance(merge, list) and not any(" " in token for token in merge) for merge in merges):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
        write_json(path, content)


def write_json(path: Path, content: dict) -> None:
    """Write an object as a JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
