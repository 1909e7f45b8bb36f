"""The exact text of token ids, for byte-level and sentencepiece tokenizers."""

from tokenizers.pre_tokenizers import ByteLevel

from llava_ds.constants import IGNORE_INDEX


def text_of_ids(ids: list[int], tokenizer) -> str:
    """The text of ids, nothing stripped and nothing tidied."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    of_bytes = dict(zip(sorted(ByteLevel.alphabet()), _bytes_of_alphabet()))
    is_byte_level = "Ġ" in tokenizer.get_vocab()
    out = b""
    for i in ids:
        token = tokenizer.convert_ids_to_tokens(int(i))
        if i in added:
            out += added[i].replace("▁", " ").encode()
        elif is_byte_level:
            out += bytes(of_bytes[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x"):
            out += bytes([int(token[3:5], 16)])
        else:
            out += token.replace("▁", " ").encode()
    return out.decode()


def _bytes_of_alphabet() -> list[int]:
    """Byte of every letter in GPT-2's byte-level alphabet, in the letters' order."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return shown + [byte for byte in range(256) if byte not in shown]


def runs(labels, end_ids: set[int] = frozenset()) -> list[list[int]]:
    """Every unbroken run of supervised ids; a run ends after an end marker."""
    found, run = [], []
    for label in [*map(int, labels), IGNORE_INDEX]:
        if label != IGNORE_INDEX:
            run.append(label)
        if run and (label == IGNORE_INDEX or label in end_ids):
            found.append(run)
            run = []
    return found
