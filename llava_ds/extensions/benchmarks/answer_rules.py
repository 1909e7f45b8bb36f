"""Parse and compare answers with the rules of each benchmark's official code.

Each function names the code whose behaviour it matches, including the bugs that influenced published scores.
"""

import re
import string
from collections.abc import Callable

ANLS_THRESHOLD = 0.5  # lower similarities count as 0
RELATIVE_CHANGE = 0.05  # tolerance for a number in a chart
FORMULAS = "Handwritten Mathematical Expression Recognition"  # OCRBench ignores spaces in this category


def anls(answer: str, references: list[str]) -> float:
    """Return the highest normalised Levenshtein similarity to a reference, 0 below the threshold.

    Source: ST-VQA (arXiv 1905.13648), section 5, as in the evaluation of DocVQA and InfographicVQA: case and repeated
    spaces don't count as differences, but the length for normalisation includes these spaces.
    """

    def distance(reference: str) -> float:
        length = max(len(reference.upper()), len(answer.upper()))
        return edit_distance(*(" ".join(text.lower().split()) for text in (reference, answer))) / (length or 1)

    similarity = 1 - min(map(distance, references))
    return similarity if similarity >= ANLS_THRESHOLD else 0.0


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the number of inserted, deleted and replaced characters."""
    before = list(range(len(other) + 1))
    for i, mine in enumerate(one, 1):
        now = [i]
        for j, theirs in enumerate(other, 1):
            now.append(before[j - 1] if mine == theirs else 1 + min(before[j - 1], before[j], now[-1]))
        before = now
    return before[-1]


def relaxed_match(answer: str, references: list[str]) -> bool:
    """True if a number is within 5 % of a reference, or a text equals it except for case.

    Source: ChartQA (arXiv 2203.10244), section 5.1, as pix2struct's metrics compute it.
    """

    def matches(reference: str) -> bool:
        found, expected = _chart_number(answer), _chart_number(reference)
        if found is None or not expected:
            return answer.lower() == reference.lower()
        return abs(found - expected) / abs(expected) <= RELATIVE_CHANGE

    return any(map(matches, references))


def _chart_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def contains_text(answer: str, references: list[str], category: str) -> bool:
    """True if the answer contains a reference. Formulas ignore spaces but not case; other categories the opposite.

    Source: OCRBench (arXiv 2305.07895), example.py.
    """
    if category == FORMULAS:
        texts = [text.strip().replace("\n", " ").replace(" ", "") for text in (answer, *references)]
    else:
        texts = [text.lower().strip().replace("\n", " ") for text in (answer, *references)]
    return any(reference in texts[0] for reference in texts[1:])


def leads_with_letter(answer: str, letter: str) -> bool:
    """True if an answer starts with the letter, optionally after "(", "option " or "the answer is ", in any case.

    Source: MMStar (arXiv 2403.20330), its evaluation code.
    """
    text, letter = (each.lower().strip().replace("\n", " ") for each in (answer, letter))
    behind = [len(start) for start in ("", "(", "option ", "the answer is ") if text.startswith(start)]
    return any(text[place : place + 1] == letter for place in behind)


def first_character(answer: str, letter: str) -> bool:
    """True if an answer's first character is the letter, in any case.

    Source: lmms-eval's SEED-Bench. For one-letter answers, LLaVA's script gives the same result.
    """
    return answer.strip()[:1].lower() == letter.lower()


def letter_alone(answer: str, letter: str) -> bool:
    """True if an answer is the letter, ignoring case and punctuation, or starts with the letter and a full stop.

    Source: lmms-eval's AI2D.
    """
    if match := re.match(r"\s*([A-Z])\.", answer):
        answer = match[1]
    return answer.lower().translate(str.maketrans("", "", string.punctuation)) == letter.lower()


def first_yes_or_no(answer: str) -> str | None:
    """Return yes or no if an answer's first four characters contain it, in any case; else None.

    Source: MME (arXiv 2306.13394), calculation.py.
    """
    return next((word for word in ("yes", "no") if word in answer.lower()[:4]), None)


def mmmu_letter(answer: str, options: dict[str, str]) -> str | None:
    """Return the option that an answer names last: as "(B)", "B", "B.", or by its text if the answer has six words.

    Returns None if the answer names no option. The official code then chooses an option at random.
    Source: MMMU (arXiv 2311.16502), eval_utils.py.
    """
    for mark in ",.!?;:'":
        answer = answer.strip(mark)
    answer = f" {answer} "
    lowered = answer.lower()
    long = len(answer.split()) > 5
    ways: list[tuple[Callable[[str], bool], Callable[[str], int]]] = [
        (lambda letter: f"({letter})" in answer, lambda letter: answer.rfind(f"({letter})")),
        (lambda letter: f"{letter} " in answer, lambda letter: answer.rfind(f" {letter} ")),
        (lambda letter: f"{letter}." in answer, lambda letter: answer.rfind(f" {letter} ")),
        (
            lambda letter: long and options[letter].lower() in lowered,
            lambda letter: lowered.rfind(options[letter].lower()),
        ),
    ]
    for is_named, place in ways:
        if named := list(filter(is_named, options)):
            return max(named, key=place)  # the first one among several at the same place
    return None


_BEFORE_RESULT = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_MMMU_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",  # with thousands separators
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)


def mmmu_open_match(answer: str, references: list[str]) -> bool:
    """True if a result in the answer contains a reference, or equals one as a number rounded to two decimals.

    Source: MMMU (arXiv 2311.16502), eval_utils.py.
    """
    texts = _mmmu_results(answer)
    numbers = [number for text in texts for pattern in _MMMU_NUMBERS for number in re.findall(pattern, text)]
    found = [value for text in (*texts, *numbers) for value in _mmmu_values(text)]
    expected = [value for text in references for value in _mmmu_values(text)]
    return any(
        any(isinstance(each, str) and each in value for each in expected) if isinstance(value, str)
        else value in expected
        for value in found
    )  # fmt: skip


def _mmmu_results(answer: str) -> list[str]:
    """Return the end of each line after its last result word; the whole answer if no line has one."""
    answer = answer.strip().strip(".").lower()
    *lines, last = answer.split("\n")
    results = []
    for line, marks in [*((line, _BEFORE_RESULT) for line in lines), (last, (*_BEFORE_RESULT, "="))]:
        ends = [line.split(mark)[-1].strip() for mark in marks if mark in line]
        shortest = ""
        for end in ends:
            if not shortest or len(end) < len(shortest):
                shortest = end
        if shortest and shortest not in tuple(":,.!?;'"):
            results.append(shortest)
    return results or [answer]


def _mmmu_values(text: str) -> list[str | float]:
    """Return the text as a rounded number or in lower case. A single character gets a space, to match only words."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def mathvista_extraction(answer: str, reference: dict) -> str | None:
    """Return the part of an answer to compare; None if the official code needs a language model to find it.

    Accepts an option's text or letter, an integer, float or list without other text, and the text after "The answer
    is". Source: MathVista (arXiv 2310.02255), extract_answer.py with --quick_extract. There, a language model would
    extract a letter or list, but when an answer has no other text, the model only repeats it.
    """
    choices, kind = reference["choices"], reference["answer_type"]
    if not answer or answer in choices:
        return answer
    try:
        if kind == "integer":
            return str(int(answer))
        if kind == "float":
            return str(float(answer))
    except ValueError:
        pass
    if match := re.search(r'The answer is "(.*)"\.', answer):
        return match[1]
    if match := re.fullmatch(r"\(?([A-Z])\)?\.?", answer):
        return match[1] if ord(match[1]) - ord("A") < len(choices) else None
    return answer if kind == "list" and answer.startswith("[") and answer.endswith("]") else None


def mathvista_match(extraction: str, reference: dict) -> bool:
    """True if the extracted text equals the answer, after conversion to the nearest option, an integer or a float.

    Source: MathVista (arXiv 2310.02255), calculate_score.py.
    """
    choices, kind = reference["choices"], reference["answer_type"]
    found: str | None = extraction
    if choices:
        text = extraction.strip()
        bracketed = re.search(r"\(([a-zA-Z])\)", text)
        letter = bracketed[1].upper() if bracketed else text
        number = ord(letter) - ord("A") if len(letter) == 1 else -1
        in_range = 0 <= number < len(choices)
        found = choices[number] if in_range else min(choices, key=lambda choice: edit_distance(letter, choice))
    elif kind in ("integer", "float"):
        try:
            number = float(extraction)
            found = str(int(number)) if kind == "integer" else str(round(number, reference["precision"]))
        except (ValueError, OverflowError):
            found = None
    return found == reference["answer"]


Box = tuple[float, float, float, float]  # left, top, right, bottom

_NUMBER = r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?"
_BOX = re.compile(rf"\[\s*({_NUMBER})" + rf"(?:\s*,\s*|\s+)({_NUMBER})" * 3 + r"\s*\]")


def named_box(answer: str) -> Box | None:
    """Return the first four numbers in brackets, or else in the whole answer; None if there are fewer.

    Source: VLMEvalKit's RefCOCO.
    """
    match = _BOX.search(answer)
    numbers = list(match.groups()) if match else re.findall(_NUMBER, answer)[:4]
    return tuple(map(float, numbers)) if len(numbers) == 4 else None


def _scaled(box: Box, scale: float, size: tuple[float, float]) -> Box:
    width, height = (side * scale for side in size)
    return (box[0] * width, box[1] * height, box[2] * width, box[3] * height)


def _unpadded(box: Box, size: tuple[float, float]) -> Box:
    """Convert a box relative to the padded square of an image to pixels of the image."""
    side = max(size)
    left, top = ((side - each) / 2 for each in size)
    return (box[0] * side - left, box[1] * side - top, box[2] * side - left, box[3] * side - top)


# Box units of models; each function converts a box to pixels of the original image, given the (width, height) before
# and after the model's resize.
BOX_UNITS: dict[str, Callable[[Box, tuple[float, float], tuple[float, float]], Box]] = {
    "0_to_1": lambda box, size, _: _scaled(box, 1, size),
    # relative to the padded square, LLaVA's training format
    "0_to_1_padded": lambda box, size, _: _unpadded(box, size),
    "0_to_1000": lambda box, size, _: _scaled(box, 1 / 1000, size),
    "pixels": lambda box, size, _: box,
    # Qwen2.5-VL's training format
    "resized_pixels": lambda box, size, resized: _scaled([n / side for n, side in zip(box, resized * 2)], 1, size),
    "0_to_1000_y_first": lambda box, size, _: _scaled((box[1], box[0], box[3], box[2]), 1 / 1000, size),  # Gemma 4's
}


def box_iou(one: Box, other: Box) -> float:
    """Intersection over union of two boxes; 0 if both are empty."""
    sides = [min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1)]
    shared = max(0.0, sides[0]) * max(0.0, sides[1])
    union = sum(max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (one, other)) - shared
    return shared / union if union > 0 else 0.0
