"""Split captions into words like COCO's evaluation: lower-case Penn Treebank tokens without punctuation.

Source: the Stanford tokenizer (CoreNLP 3.4.1, PTBTokenizer -preserveLines -lowerCase) that pycocoevalcap runs in Java,
for the text in captions; docs/benchmarks.md lists the differences.
"""

import re

DROPPED = {"''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"}
# The official code drops these names only in upper case, by mistake; in lower case they count as words.
BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
PARTED = {
    "cannot": "can not", "gonna": "gon na", "gotta": "got ta", "wanna": "wan na", "lemme": "lem me", "gimme": "gim me",
    "'tis": "'t is", "'twas": "'t was",
}  # fmt: skip

# They keep their full stop; after other words it is dropped.
ABBREVIATIONS = (
    "mr mrs ms dr prof jr sr st ave blvd rd bros inc ltd co corp vs etc gen col sgt capt lt gov sen rep rev hon "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri"
)

_LETTER = r"[^\W\d_]"
_TOKEN = re.compile(
    "|".join(
        [
            r"https?://\S+?(?=[.,;:!?)\"']*(?:\s|$))",
            r"www\.\S+?(?=[.,;:!?)\"']*(?:\s|$))",
            r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
            rf"(?<![^\W_])(?:{_LETTER}\.){{2,}}",  # u.s.
            rf"(?<![^\W_])(?:(?:{ABBREVIATIONS.replace(' ', '|')})\.(?![^\W_])|no\.(?=\s*\d))",
            r"cannot\b|gonna\b|gotta\b|wanna\b|lemme\b|gimme\b|'t(?:is|was)\b",
            r"'\d0s\b|'n'?(?!\w)|y'(?=all\b)|d'ye\b",
            r"(?:o'clock|ma'am)\b",
            rf"{_LETTER}+?(?=n't\b)",
            r"n't\b",
            r"'(?:s|ll|re|ve|d|m)\b",
            r"[+-]?\d*[.]?\d+(?:[.,:/-]\d+)*(?:st|nd|rd|th|s)?(?![^\W_]|[-/][^\W_])",
            r"at&t\b|c\+\+",
            r"@?[^\W_]+(?:[-/._](?=[^\W_])[^\W_]+)*",
            r"\.\.\.|\.|--+|``|''|_+|[!?]{2,}",
            r"\S",
        ]
    )
)


def caption_words(text: str) -> list[str]:
    """Return a caption's words in lower case."""
    text = text.lower().replace("…", "...").replace("’", "'").replace("‘", "`").replace("“", "``").replace("”", "''")
    text = text.replace('"', "''")
    words = (word for token in _TOKEN.findall(text) for word in PARTED.get(token, BRACKETS.get(token, token)).split())
    return [word for word in words if word not in DROPPED]
