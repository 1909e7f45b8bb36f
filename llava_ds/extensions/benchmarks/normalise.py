"""Answers as VQA's and TextVQA's evaluations spell them before they compare.

Source: "VQA: Visual Question Answering" (arXiv 1505.00468) and its evaluation code (GT-Vision-Lab/VQA), EvalAI's
processor as MMF and LLaVA use it. Their quirks are kept, for they are part of the published figures.
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

# Right spellings; what is mapped to one is the same with an apostrophe missing, whichever it is.
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
CONTRACTIONS["somebody'd"] = "somebodyd"  # the official table has this one the wrong way round

_POINT = re.compile(r"\.(?!\d)")
_THOUSANDS = re.compile(r"\d,\d")
MAX_POINTS = 32  # the official code gives re.UNICODE, which is 32, where re.sub takes the number of replacements


def vqa_punctuation(text: str) -> str:
    """The text without punctuation: a mark beside a space is dropped, one between two letters becomes a space."""
    drops_all = _THOUSANDS.search(text) is not None
    result = text
    for mark in PUNCTUATION:
        drops = drops_all or f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if drops else " ")
    return _POINT.sub("", result, count=MAX_POINTS)


def vqa_words(text: str) -> str:
    """The text in lower case with numbers as digits, without articles, and with apostrophes in contractions."""
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def vqa_answer(text: str) -> str:
    """A model's answer as VQA compares it."""
    return vqa_words(vqa_punctuation(text.replace("\n", " ").replace("\t", " ").strip()))


def evalai_answer(text: str) -> str:
    """An answer, a model's or a person's, as TextVQA's evaluation compares it."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return vqa_answer(text)


def plain_answer(text: str) -> str:
    """The text in lower case without spaces around it and without the full stop."""
    return text.strip().rstrip(".").lower()
