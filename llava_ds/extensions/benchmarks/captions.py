"""Score captions, one per image, by CIDEr-D and ROUGE-L.

A caption is a list of words from caption_words(). cider() and rouge_l() take the model's captions, and a list of
reference captions per image.
"""

import math
import re
from collections import Counter

DROPPED = {"''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"}
# The official code drops these names only in upper case, by mistake; in lower case they count as words.
BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
PARTED = {
    "cannot": "can not", "gonna": "gon na", "gotta": "got ta", "wanna": "wan na", "lemme": "lem me", "gimme": "gim me",
    "'tis": "'t is", "'twas": "'t was",
}  # fmt: skip

# The full stop is kept after these words, and dropped after all others.
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
    """Split a caption into words like COCO's evaluation: lower-case Penn Treebank tokens without punctuation.

    Source: the Stanford tokenizer in Java (CoreNLP 3.4.1, PTBTokenizer -preserveLines -lowerCase) that pycocoevalcap
    runs. docs/benchmarks.md lists the differences.
    """
    text = text.lower().replace("…", "...").replace("’", "'").replace("‘", "`").replace("“", "``").replace("”", "''")
    text = text.replace('"', "''")
    words = (word for token in _TOKEN.findall(text) for word in PARTED.get(token, BRACKETS.get(token, token)).split())
    return [word for word in words if word not in DROPPED]


LONGEST = 4  # longest n-gram, in words
SIGMA = 6.0  # width, in words, of the Gaussian penalty for a difference in length
BETA = 1.2  # weight of recall against precision in ROUGE-L

NGram = tuple[str, ...]
Vector = tuple[list[dict[NGram, float]], list[float], int]  # weights and norms by n-gram length, and number of bigrams


def cider(captions: list[list[str]], references: list[list[list[str]]]) -> list[float]:
    """Return the CIDEr-D of each caption, 0 to 10. An n-gram's document frequency is counted over the given images.

    Source: "CIDEr: Consensus-based Image Description Evaluation" (arXiv 1411.5726), section 5, as COCO computes it.
    """
    counted = [[_ngrams(reference) for reference in each] for each in references]
    images_with = Counter(ngram for each in counted for ngram in set().union(*each))
    log_images = math.log(len(references)) if references else 0.0

    def weighted(counts: Counter[NGram]) -> Vector:
        weights: list[dict[NGram, float]] = [{} for _ in range(LONGEST)]
        for ngram, count in counts.items():
            rarity = log_images - math.log(max(1, images_with[ngram]))
            weights[len(ngram) - 1][ngram] = count * rarity
        norms = [math.sqrt(sum(weight**2 for weight in each.values())) for each in weights]
        return weights, norms, sum(count for ngram, count in counts.items() if len(ngram) == 2)

    scores = []
    for caption, own in zip(captions, counted, strict=True):
        asked = weighted(_ngrams(caption))
        total = sum(sum(_similarity(asked, weighted(reference))) for reference in own)
        scores.append(10 * total / LONGEST / len(own))
    return scores


def _ngrams(words: list[str]) -> Counter[NGram]:
    return Counter(tuple(words[i : i + n]) for n in range(1, LONGEST + 1) for i in range(len(words) - n + 1))


def _similarity(caption: Vector, reference: Vector) -> list[float]:
    """Return the cosine similarity per n-gram length, clipped to the reference's counts, with the length penalty."""
    (own, own_norms, own_length), (theirs, their_norms, their_length) = caption, reference
    penalty = math.exp(-((own_length - their_length) ** 2) / (2 * SIGMA**2))
    similarities = []
    for n in range(LONGEST):
        shared = sum(min(own[n][ngram], theirs[n][ngram]) * theirs[n][ngram] for ngram in own[n].keys() & theirs[n])
        norm = own_norms[n] * their_norms[n]
        similarities.append(penalty * shared / norm if norm else 0.0)
    return similarities


def rouge_l(captions: list[list[str]], references: list[list[list[str]]]) -> list[float]:
    """Return the ROUGE-L of each caption, 0 to 1, from the best precision and best recall over its references.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004), section 3, as COCO computes it.
    """
    scores = []
    for caption, own in zip(captions, references, strict=True):
        # As in the official code, an empty text has one empty word, so two empty texts are equal.
        caption, own = caption or [""], [reference or [""] for reference in own]
        common = [_common_length(caption, reference) for reference in own]
        precision = max(common) / len(caption)
        recall = max(length / len(reference) for length, reference in zip(common, own))
        both = recall + BETA**2 * precision
        scores.append((1 + BETA**2) * precision * recall / both if precision and recall else 0.0)
    return scores


def _common_length(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence."""
    before = [0] * (len(other) + 1)
    for word in one:
        now = [0]
        for j, theirs in enumerate(other):
            now.append(before[j] + 1 if word == theirs else max(before[j + 1], now[j]))
        before = now
    return before[-1]
