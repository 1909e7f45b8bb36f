"""Find the option that an answer to a multiple-choice question names."""

import re

LETTERS = "ABCDE"

_IN_SENTENCE = re.compile(r"The answer is ([A-E])")
_AROUND = [("", "."), ("", ","), ("", ":"), ("", ")"), ("", ")."), ("(", ")"), ("(", ").")]
_AROUND += [(":", ""), (":", ","), (":", "."), (":", ")"), (":", ").")]


def named_letter(answer: str, num_choices: int) -> int | None:
    """Return the index of the option that an answer like "B", "B. text" or "The answer is B." names, or None.

    Source: LLaVA's evaluation of ScienceQA (llava/eval/eval_science_qa.py).
    """
    answer = answer.replace("\n", ". ")
    found = None
    if answer.strip() in LETTERS and len(answer.strip()) == 1:
        found = answer.strip()
    elif answer[:1] in LETTERS and answer[1:3] == ". ":
        found = answer[0]
    elif match := _IN_SENTENCE.search(answer):
        found = match[1]
    if found is None or LETTERS.index(found) >= num_choices:
        return None
    return LETTERS.index(found)


def matched_letter(answer: str, options: dict[str, str]) -> str | None:
    """Return the single letter in an answer, else the letter of the only option whose text the answer contains.

    options: texts by letter, A to D. Returns None if an answer names no option; no language model interprets it.
    Source: "MMBench" (arXiv 2307.06281), section 4.2, step 1, as in its evaluation code.
    """
    pieces = set(answer.split())
    for before, after in [("", ""), *_AROUND]:
        found = [letter for letter in LETTERS if before + letter + after in pieces]
        if len(found) == 1:
            if (before, after) == ("", "") and "A" in pieces and len(answer.split()) > 3:
                continue  # "A" may be the article
            return found[0]
    lowered = answer.lower()
    found = [letter for letter, text in options.items() if text.lower() in lowered]
    return found[0] if len(found) == 1 else None


def says_yes(answer: str) -> bool:
    """True if an answer means yes, that is, if its first sentence has none of the words No, no and not.

    Source: POPE (arXiv 2305.10355), evaluate.py.
    """
    words = answer.split(".")[0].replace(",", "").split(" ")
    return not {"No", "not", "no"} & set(words)
