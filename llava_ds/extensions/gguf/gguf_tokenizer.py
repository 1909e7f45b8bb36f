"""Convert a tokenizer and its chat template for llama.cpp, and write Ollama's Modelfile."""

import json
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from llava_ds.constants import ConfigError
from llava_ds.data.end_markers import end_markers
from llava_ds.data.jinja_templates import llama_cpp_template
from llava_ds.data.sample import Message
from llava_ds.data.templates import TEMPLATES, render, resolve_template
from llava_ds.export.export_plan import ExportPlan
from llava_ds.tokenizer import SPACE, begins_with_bos

# Regular expressions by which byte-level tokenizers pre-split text: llama.cpp's name for each, and True if the merges
# are ignored for words that are tokens themselves (Llama 3). SmolLM splits digits first, then like GPT-2.
_DIVIDES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS = {
    _DIVIDES % "{1,3}": ("llama-bpe", True), _DIVIDES % "": ("qwen2", False), None: ("gpt-2", False),
    "digits": ("smollm", False),
}  # fmt: skip


def add_tokenizer(writer, export: ExportPlan, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Add the keys of the exported tokenizer to a gguf.GGUFWriter. rows: number of embedding rows.

    Raises ConfigError for tokenizers that llama.cpp would interpret differently.
    """
    from gguf import TokenType

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, name = content["model"], tokenizer.name_or_path
    if model["type"] != "BPE" or not (model.get("byte_fallback") or _is_byte_level(content)):
        raise ConfigError(
            f"{name}: --format gguf takes sentencepiece's BPE with bytes and byte-level BPE, this is {model['type']}"
        )
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder

    def type_of(i: int) -> TokenType:
        if i not in tokens:
            return TokenType.UNUSED
        if tokens[i] == model.get("unk_token"):
            return TokenType.UNKNOWN
        if i in added:
            return TokenType.CONTROL if added[i].special else TokenType.USER_DEFINED
        is_byte = model.get("byte_fallback") and tokens[i] in _BYTES
        return TokenType.BYTE if is_byte else TokenType.NORMAL

    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(rows)])
    writer.add_token_types([type_of(i) for i in range(rows)])
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        scores = _scores(tokenizer, model, merges)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([scores.get(tokens.get(i), 0.0) for i in range(rows)])
        writer.add_add_space_prefix(tokenizer.tokenize("x", add_special_tokens=False)[0].startswith(SPACE))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(content, tokenizer))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    _add_ends(writer, export, tokenizer)


def _add_ends(writer, export: ExportPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the special tokens and the chat template.

    llama.cpp adds bos itself and removes it from the template's output, except for templates that training tokenizes
    as one text, bos included.
    """
    args = export.args
    version = resolve_template(args.version)
    ends = end_markers(version, tokenizer)
    for add, ids in (
        (writer.add_bos_token_id, [tokenizer.bos_token_id]),
        (writer.add_eos_token_id, ends[:1]),
        (writer.add_eot_token_id, ends[1:2]),
        (writer.add_unk_token_id, [tokenizer.unk_token_id]),
        (writer.add_pad_token_id, [tokenizer.pad_token_id]),
    ):
        for i in ids:
            if i is not None:
                add(i)
    is_ours = export.template is None
    is_whole = is_ours and TEMPLATES[version].whole
    writer.add_add_bos_token(begins_with_bos(export.model.tokenizer) and not is_whole)
    writer.add_add_eos_token(False)
    if not is_ours or TEMPLATES[version].write is None:
        writer.add_chat_template(export.template or tokenizer.get_chat_template())
    else:
        writer.add_chat_template(llama_cpp_template(version, args.mm_use_im_start_end))


_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


def _scores(tokenizer: PreTrainedTokenizerBase, model: dict, merges: list[tuple[str, str]]) -> dict[str, float]:
    """Return each token's score: minus the rank of its first merge. llama.cpp joins tokens by highest score.

    llama.cpp doesn't read merges, but joins any two tokens whose text is a token. The result is the same if the merges
    tokenize every token's text as that token, and if all merges that produce a token are consecutive.
    """
    name = tokenizer.name_or_path
    if missing := _BYTES - model["vocab"].keys():
        raise ConfigError(f"{name}: --format gguf needs a token for every byte, {len(missing)} are missing")
    first: dict[str, int] = {}
    last = None
    for rank, (one, other) in enumerate(merges):
        if first.setdefault(one + other, rank) != rank and last != one + other:
            raise ConfigError(f"{name}: llama.cpp can't distinguish the separate merges to {one + other!r}")
        last = one + other
    _check_merges(tokenizer, model["vocab"].keys() - _BYTES)
    return {token: -float(rank) for token, rank in first.items()}


def _check_merges(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str]) -> None:
    """Raise ConfigError if the merges split the text of any token, because llama.cpp would not split it."""
    name, tokenize = tokenizer.name_or_path, tokenizer.backend_tokenizer.model.tokenize
    added = {added.content for added in tokenizer.added_tokens_decoder.values()}
    for token in sorted(set(tokens) - added):
        if (found := [piece.value for piece in tokenize(token)]) != [token]:
            raise ConfigError(f"{name}: llama.cpp would read {token!r} as one token, and the tokenizer reads {found}")


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": None}


def _is_byte_level(content: dict) -> bool:
    return any(step["type"] == "ByteLevel" for step in _pre_steps(content))


def _pre_steps(content: dict) -> list[dict]:
    first = content["pre_tokenizer"]
    return [] if first is None else first.get("pretokenizers", [first])


def _pre_tokenizer(content: dict, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level tokenizer."""
    *first, last = _pre_steps(content)
    pattern = None
    if first:
        pattern = "digits" if first == [_DIGITS] else first[0].get("pattern", {}).get("Regex")
    expected = _BYTE_LEVEL | {"use_regex": pattern in (None, "digits")}
    is_plain = last | {"trim_offsets": None} == expected and len(first) < 2 and bool(first) == (pattern is not None)
    found = PRE_TOKENIZERS.get(pattern) if is_plain else None
    takes_words = bool(content["model"].get("ignore_merges"))
    if found is None or (takes_words and not found[1]):
        name, known = tokenizer.name_or_path, "GPT-2, Llama 3, Qwen 2 or SmolLM"
        raise ConfigError(f"{name}: --format gguf takes byte-level tokenizers that divide a text as {known} does")
    if found[1] and not takes_words:
        _check_merges(tokenizer, content["model"]["vocab"])
    return found[0]


def modelfile(export: ExportPlan, files: tuple[str, str]) -> str:
    """Return Ollama's Modelfile with the prompt format of training. files: names of the model's and the tower's file.

    Ollama inserts images at [img] in a message. Only templates of this project are written to the Modelfile; for
    others, Ollama uses the chat template in the GGUF file.
    """
    lines = [f"FROM ./{file}" for file in files]
    version = resolve_template(export.args.version)
    rules = TEMPLATES[version]
    if export.template is None and rules.write is not None:
        lines += [
            "# Images are inserted at [img], in training on a line of their own: [img], a new line, the question."
        ]
        lines += [f'TEMPLATE """{_go_template(version)}"""']
        lines += [f'SYSTEM """{rules.system}"""'] if rules.system else []
        lines += [f"PARAMETER stop {json.dumps(marker)}" for marker in rules.end_markers if marker.strip()]
    return "\n".join(lines) + "\n"


def _go_template(version: str) -> str:
    """Return the conversation as a Go template for one question; Ollama applies it to each question.

    The system prompt precedes the first question. The space before an answer belongs to the answer.
    """
    system, question, answer = "\ue001", "\ue002", "\ue003"
    turns = [Message("human", question), Message("gpt", answer)]

    def written(num_questions: int) -> str:
        messages = [Message("system", system), *turns * num_questions]
        return "".join(segment.text for segment in render(messages, version))

    one, two = written(1), written(2)
    first, rest = one.split(question)
    start = two.split(answer)[1].split(question)[0]  # text between an answer and the next question
    end = _common_prefix(rest.split(answer)[1], start)
    before = rest.split(answer)[0].removesuffix(" ")
    others = start[len(end) :]
    opening = f"{{{{ if .System }}}}{first.replace(system, '{{ .System }}')}{{{{ else }}}}{others}{{{{ end }}}}"
    return f"{opening}{{{{ .Prompt }}}}{before}{{{{ .Response }}}}{end}"


def _common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]
