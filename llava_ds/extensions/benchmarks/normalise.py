"""Normalise answers like VQA's and TextVQA's evaluations before they are compared.

Source: "VQA: Visual Question Answering" (arXiv 1505.00468) and its evaluation code (GT-Vision-Lab/VQA), and EvalAI's
processor as in MMF and LLaVA. Their bugs are reproduced because they influenced published scores.
"""

import re

NUMBERS = {
    word: str(number)
    for number, words in enumerate(
        ["none zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
    for word in words.split()
}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'

# Contractions in correct spelling. CONTRACTIONS maps spellings without an apostrophe to them.
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
CONTRACTIONS = {
    word[: match.start()] + word[match.end() :]: word
    for word in _CONTRACTIONS.split()
    for match in re.finditer("'", word)
}
CONTRACTIONS["somebody'd"] = "somebodyd"  # key and value are swapped in the official table

_POINT = re.compile(r"\.(?!\d)")
_THOUSANDS = re.compile(r"\d,\d")
MAX_POINTS = 32  # the official code passes re.UNICODE (32) as re.sub's count


def vqa_punctuation(text: str) -> str:
    """Remove punctuation. Drops a mark that occurs next to a space, and replaces other marks by spaces."""
    drops_all = _THOUSANDS.search(text) is not None
    result = text
    for mark in PUNCTUATION:
        drops = drops_all or f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if drops else " ")
    return _POINT.sub("", result, count=MAX_POINTS)


def vqa_words(text: str) -> str:
    """Return the text in lower case with numbers as digits, without articles, and with apostrophes in contractions."""
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def vqa_answer(text: str) -> str:
    """Normalise a model's answer like VQA."""
    return vqa_words(vqa_punctuation(text.replace("\n", " ").replace("\t", " ").strip()))


def evalai_answer(text: str) -> str:
    """Normalise a model's or a person's answer like TextVQA's evaluation."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return vqa_answer(text)


def plain_answer(text: str) -> str:
    """Return the text in lower case, without surrounding spaces and final full stops."""
    return text.strip().rstrip(".").lower()
