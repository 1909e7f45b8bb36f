"""Read the files of an untrusted model folder: check that links stay inside the folder, and limit sizes.

All commands read the JSON files of model folders with this module. Before they call transformers or tokenizers on a
folder, they check its files with check_folder(); the call itself is within library_errors().
"""

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.files.reading import Stamp, read_bytes, stamp_of
from llava_ds.files.writing import utf8_problem

MAX_BYTES = 2**27  # largest JSON file; the largest published tokenizer.json has 35 MB
MAX_TEMPLATE_BYTES = 2**20  # largest chat template; published ones have 20 kB
MAX_NESTING = 64  # maximum depth of objects and lists; published files have 10
SHOWN = 60  # maximum characters shown of a wrong value

OWN_CODE = (
    "it needs its own Python code (auto_map in its JSON files); this is never run here: use a model whose classes "
    "transformers has"
)
# Files of a folder that transformers and this package read, besides weights and their indices.
JSON_FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json",
)  # fmt: skip
ADAPTER_CONFIG = "adapter_config.json"  # its presence marks an adapter's folder
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # files that peft reads, the newer format first
BESIDE_ADAPTER = "non_lora_trainables.bin"  # LLaVA writes this next to an adapter
OTHER_FILES = ("tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")
TEMPLATES_FOLDER = "additional_chat_templates"  # transformers opens its files as well
# Vocabulary files of other tokenizers in transformers. They are checked for any tokenizer class.
_MORE_JSON = (
    "tekken.json", "entity_vocab.json", "byte_maps.json", "vocab-src.json", "vocab-tgt.json", "target_vocab.json",
    "normalizer.json", "emoji.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
_VOCABULARY = re.compile(r".*\.(model|spm|bpe|codes|tiktoken|tokenizer)|(tokenizer|tiktoken)\.model.*|dict\.txt")

# Keys whose values are names of files that transformers opens.
_NAMES_JSON = ("configuration_files", "fast_tokenizer_files")
_NAMES_FILES = re.compile(rf"{'|'.join(_NAMES_JSON)}|\w+_file|transformers_weights")
# Keys of this kind in tokenizer_config.json that transformers ignores, because it finds the folder's own files.
_NEVER_READ = ("tokenizer_file", "special_tokens_map_file", "added_tokens_file", "tokenizer_config_file")
# Keys that choose kernels. If the value named a repository, transformers would download and run its code.
_IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation\w*|use_kernels|kernel_config")

# (pattern of a key's name, minimum, maximum) of sizes in a configuration. Published models need at most a tenth of the
# maximum.
SIZES = (
    (re.compile(r"num_hidden_layers|n_layers?|num_layers"), 1, 1000),
    (re.compile(r"\w*layers"), 0, 1000),
    (re.compile(r"num_(attention|key_value)_heads|n_heads?"), 1, 4096),
    (re.compile(r"num_labels|num_register_tokens|n(um)?_\w*(heads|experts|groups)\w*"), 0, 4096),
    (re.compile(r"hidden_size|intermediate_size|n_embd|ffn_dim|image_size|patch_size|num_channels|head_dim"), 1, 2**20),
    (re.compile(r"vocab_size|max_position_embeddings|n_positions"), 1, 2**28),
    (re.compile(r"\w+_(size|dim|width|channels)|num_patches"), 0, 2**28),
)


def own_file(file: Path) -> Path:
    """Resolve a file's links. Raises DataError if they lead out of its folder or to anything but a regular file.

    A link may lead to another file in the same folder, or from <model>/snapshots/<revision> to a file in <model>/blobs,
    as in Hugging Face's cache. The folder itself may be a link, because the user named it. Raises FileNotFoundError if
    the file is missing.
    """
    try:
        folder, real = file.parent.resolve(), file.resolve()
    except RuntimeError:  # raised by pathlib before Python 3.13
        raise DataError(f"{file} is a link to itself: copy the file there") from None
    rooms = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(real.is_relative_to(room) for room in rooms):
        raise DataError(f"{file} leads to {real}, outside its folder: copy the file there")
    if not stat.S_ISREG(real.stat().st_mode):
        raise DataError(f"{file} is not a regular file: copy the folder again")
    return real


def read_json(file: Path, where: str) -> dict:
    """Read the object in a JSON file, with limits on size and nesting. where: flag and folder, for messages.

    Raises ConfigError with the file's name if it can't be used.
    """
    with library_errors(where):
        return _object(file)


def _object(file: Path) -> dict:
    """Read the object in a JSON file. Raises DataError if it can't be used."""
    try:
        real = own_file(file)
    except FileNotFoundError:
        raise DataError(f"no {file.name} found: copy the folder again") from None
    try:
        text = read_bytes(real, MAX_BYTES)
        found = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
        problem = _shape_problem(found) or _surrogate_problem(text)
    except RecursionError:
        problem = f"it is nested deeper than {MAX_NESTING} levels"
    except (OSError, ValueError) as error:  # includes DataError
        problem = str(error)
    if problem:
        raise DataError(f"{file.name} can't be read ({problem}): copy it again")
    return found


def is_there(file: Path) -> bool:
    """Return True if the path exists, even as a dangling link."""
    return file.exists() or file.is_symlink()


def adapter_file(folder: str | Path) -> Path | None:
    """Return the file with an adapter's weights, or None. Raises DataError if it leads out of the folder."""
    file = next((path for name in ADAPTER_FILES if (path := Path(folder) / name).is_file()), None)
    if file is not None:
        own_file(file)
    return file


def is_adapter(path: str | Path) -> bool:
    """Return True if a folder contains an adapter."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_json_if_there(file: Path, where: str) -> dict:
    """Read a JSON file like read_json; return {} if it does not exist."""
    return read_json(file, where) if is_there(file) else {}


def read_config(file: Path, where: str) -> dict:
    """Read a model's config.json, without the keys that choose kernels. Raises ConfigError if sizes are out of bounds
    or a plugin is missing."""
    config = read_json(file, where)
    if "llava_ds_plugin" in config:
        from llava_ds.extensions.missing_plugins import refuse_missing

        refuse_missing(config, where)
    with library_errors(where):
        _check_says(config, file)
    return _without_implementations(config)


def size_problem(config: dict, path: str = "") -> str | None:
    """Describe the first size in a configuration that is out of bounds, with the expected range; None if there is
    no such size. path: prefix of the keys in the message."""
    for key, value in config.items():
        if isinstance(value, dict):
            if problem := size_problem(value, f"{path}{key}."):
                return problem
            continue
        if not isinstance(value, (int, float)):
            continue  # types are checked by transformers' classes
        least, most = next(((low, high) for name, low, high in SIZES if name.fullmatch(key)), (None, None))
        if isinstance(value, float) and not math.isfinite(value):
            return f"{path}{key} {value}: expected a finite number"
        if least is not None and (isinstance(value, bool) or value != int(value) or not least <= value <= most):
            return f"{path}{key} {shown(value)}: expected a whole number from {least} to {most}"
    return None


def check_folder(path: str | Path, where: str) -> None:
    """Check all files of a folder that transformers or tokenizers may open themselves.

    A folder is checked again only if a file in it has changed. Raises ConfigError if a file is outside the folder, not
    regular, too large, too deeply nested or not a JSON object, or if it names files elsewhere.
    """
    folder = Path(path)
    if problem := utf8_problem(str(path)):
        raise ConfigError(f"{where}: {problem}")
    if folder.is_dir():
        with library_errors(where, "its files can't be read"):
            _check_files(folder, _stamps(folder))


def _stamps(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    """Return (name, stamp) of a folder's files and of its additional chat templates.

    Raises DataError if a file leads out of the folder, or if one in JSON_FILES or OTHER_FILES is a dangling link.
    """
    files = list(folder.iterdir())
    templates = folder / TEMPLATES_FOLDER
    if templates.is_dir():
        if templates.resolve().parent != folder.resolve():
            raise DataError(f"{TEMPLATES_FOLDER} leads out of the folder: copy it there")
        files += templates.glob("*.jinja")
    stamps = []
    for file in sorted(files):
        name = str(file.relative_to(folder))
        if file.exists() and not file.is_dir():
            own_file(file)
            stamps.append((name, stamp_of(file)))
        elif file.is_dir() and name in (*JSON_FILES, *OTHER_FILES):
            raise DataError(f"{file} is not a regular file: copy the folder again")
        elif not file.is_dir() and name in (*JSON_FILES, *OTHER_FILES):
            raise DataError(f"{file} is a broken link: copy the file there")
    return tuple(stamps)


@lru_cache(maxsize=64)
def _check_files(folder: Path, stamps: tuple[tuple[str, Stamp], ...]) -> None:
    """Read and check the files for check_folder. stamps: from _stamps, also part of the cache's key."""
    sizes = {name: stamp.num_bytes for name, stamp in stamps}
    names = [name for name in (*JSON_FILES, *_MORE_JSON) if name in sizes]
    for name in names:  # the loop appends to the list
        content = _object(folder / name)
        _check_says(content, folder / name)
        named = (value for key in _NAMES_JSON if isinstance(value := content.get(key), list))
        names += [other for value in named for other in value if other in sizes and other not in names]
    for name, size in sizes.items():
        is_template = name.endswith(".jinja")
        most = MAX_TEMPLATE_BYTES if is_template else MAX_BYTES
        if (is_template or name in OTHER_FILES or _VOCABULARY.fullmatch(name)) and size > most:
            raise DataError(f"{folder / name} has {size:,} bytes, expected at most {most:,}: copy it again")


@contextlib.contextmanager
def library_errors(where: str, what: str = "it can't be opened") -> Iterator[None]:
    """Convert all errors within the block to ConfigErrors. where, what: beginning of the message.

    transformers, tokenizers and torch raise many types of errors. Use it only around calls whose input is the folder.
    """
    try:
        yield
    except ConfigError:
        raise
    except DataError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: {what} ({said_by(error)}): copy it again") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by tokenizers; not a subclass of Exception
            raise
        raise ConfigError(f"{where}: {what} (the tokenizers library crashed: {said_by(error)})") from error


def said_by(error: BaseException) -> str:
    """Shorten a library's error message about a folder, and drop advice to run the folder's own code."""
    text = str(error).strip()
    if "trust_remote_code" in text or "custom code" in text:
        return OWN_CODE
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(lines[:3])[:500]
    plain = isinstance(error, (OSError, ValueError, ImportError)) and not isinstance(error, UnicodeError)
    return said if said and plain else f"{type(error).__name__}: {said}"


def shown(value: object) -> str:
    """Format a value from a file for a message, shortened to SHOWN characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse_constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it is NaN, expected a number")
    return float(name)


def _shape_problem(found: object) -> str | None:
    if not isinstance(found, dict):
        return "it is no JSON object"
    level: list = [found]
    for _ in range(MAX_NESTING):
        level = [
            value
            for one in level
            for value in (one.values() if isinstance(one, dict) else one)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return None
    return f"it is nested deeper than {MAX_NESTING} levels"


def _surrogate_problem(text: bytes) -> str | None:
    """Describe a lone surrogate in JSON text, or return None. Files and terminals can't represent surrogates."""
    if re.search(rb"\\u[dD][89a-fA-F]", text) is None:
        return None
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return "it has half a character (a lone surrogate)"
    return None


def _check_says(content: dict, file: Path) -> None:
    """Raise DataError if a JSON file names files outside its folder, or if a config.*json has sizes out of bounds."""
    for key, value in content.items():
        if _NAMES_FILES.fullmatch(key) and not (file.name == "tokenizer_config.json" and key in _NEVER_READ):
            for name in value if isinstance(value, list) else [value]:
                if name is not None and not _is_in_folder(name, key, file):
                    raise DataError(
                        f"{file.name} says {key} {shown(name)}, not a file in its folder: take it out, or copy the "
                        "folder again"
                    )
    if file.name.startswith("config.") and (problem := size_problem(content)):
        raise DataError(f"{file.name} says {problem}")


def _is_in_folder(name: object, key: str, file: Path) -> bool:
    """Return True if a value names a file in the same folder. In tokenizer_config.json, also allow paths of files that
    don't exist: paths from another machine are common there, and harmless."""
    if not isinstance(name, str):
        return False
    if file.name == "tokenizer_config.json" and key not in _NAMES_JSON and "\0" not in name:
        return Path(name).name == name or not os.path.isfile(name)
    return Path(name).name == name


def _without_implementations(config: dict) -> dict:
    return {
        key: _without_implementations(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _IMPLEMENTATIONS.fullmatch(key)
    }
