"""Build backends for the tokenizers library from sentencepiece models (tokenizer.model)."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import import_protobuf

from llava_ds.constants import SPACE
from llava_ds.files.model_files import read_json_if_there


def read_model(path: Path):
    """Parse a sentencepiece BPE model. Returns None for other files, because tiktoken uses the same name."""
    module = import_protobuf()
    try:
        proto = module.ModelProto.FromString(path.read_bytes())
    except Exception:  # protobuf has its own errors; other files of this name are not sentencepiece's
        return None
    return proto if proto.trainer_spec.model_type == module.TrainerSpec.ModelType.BPE else None


def _declared_tokens(folder: Path, config: dict) -> set[str]:
    """Return the tokens that a folder's files add to sentencepiece's vocabulary or declare as special."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    named += config.get("additional_special_tokens") or []
    named += (config.get("added_tokens_decoder") or {}).values()
    for name in ("special_tokens_map.json", "added_tokens.json"):
        for key, value in read_json_if_there(folder / name, str(folder)).items():
            named += [key] if isinstance(value, int) else value if isinstance(value, list) else [value]
    return {token["content"] if isinstance(token, dict) else token for token in named if isinstance(token, (str, dict))}


def backend_of(
    tokenizer: PreTrainedTokenizerBase, proto, folder: Path, config: dict, first_space_only: bool
) -> Tokenizer:
    """Build a backend that tokenizes like sentencepiece: normalisation, spaces, unsplittable symbols, merges.

    Source: sentencepiece's normalizer, and LlamaTokenizer in transformers 4.37 (it tokenizes the texts between
    added tokens separately).
    """
    declared = _declared_tokens(folder, config)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    types = type(proto.pieces[0])
    symbols = {piece.piece for piece in proto.pieces if piece.type == types.USER_DEFINED} - declared
    state["added_tokens"] = [
        {**token, "normalized": False} for token in state["added_tokens"] if token["content"] not in symbols
    ]
    state["normalizer"] = state["pre_tokenizer"] = None
    state["model"] |= {
        "unk_token": proto.trainer_spec.unk_piece,
        "byte_fallback": any(piece.type == types.BYTE for piece in proto.pieces),
        "ignore_merges": bool(symbols),  # no merges produce a symbol, so it has to be looked up as a whole word
    }
    backend = Tokenizer.from_str(json.dumps(state))

    spec, steps = proto.normalizer_spec, []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r" +\z" if first_space_only else r"\A +| +\z"), ""))
    if spec.add_dummy_prefix and not first_space_only:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    splits = []
    if first_space_only:
        splits.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    if symbols:
        longest_first = sorted((symbol.replace(" ", SPACE) for symbol in symbols), key=len, reverse=True)
        splits.append(pre_tokenizers.Split(Regex("|".join(map(_escaped, longest_first))), "isolated"))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0]
    return backend


def _escaped(text: str) -> str:
    """Escape a text as a regular expression for the tokenizers library."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)
