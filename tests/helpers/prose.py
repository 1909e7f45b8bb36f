"""Count habits of writing that make a reader go back to the beginning of a sentence.

A single use may be right. The rate over all texts shows whether they are written as an engineer speaks: name the thing,
then the verb, then stop.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator

LEAST_WORDS = 5  # shorter strings of the code are names and keys
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_BE = r"(?:is|are|was|were|be)"
_NOUN_AFTER_WHAT = r"(?:is|was|are|were|it|they|a|an|the|this|each|[a-z]+s)"

# Name of a habit, and where it begins in a text.
HABITS = {
    "a sentence that begins with Of": r"(?:^|[.;:!?]\s+)Of [a-z]",
    "a text that begins with of": r"^of [a-z]",
    "that of, those which": r"\b(?:that|those) (?:of|which|whose)\b",
    "of each, of it at the end": r"\bof (?:each|it|them|one|both|all)\s*(?:[.,;:)]|$)",
    "what as a noun": rf"(?:^|[ (,;:])[Ww]hat {_NOUN_AFTER_WHAT} ",
    "as they are": r"\bas (?:(?:they|it) (?:is|are|was|were)|they stand)\b",
    "go on": r"\b(?:go|goes|went|gone|going) on\b",
    "things that tell or ask": rf"\b(?:passed over|{_BE} told|tells?|asks?)\b",
    "things that lie or stand": r"\b(?:lies?|lay|lain|stands?|stood)\b",
    "there is none": r"\b(?:there (?:is|are) (?:none|no)|[Ww]here there)\b",
    "is no such thing": rf"\b{_BE} no [a-z]+",
    "inversion": r"\b(?:[Nn]or (?:does|do|is|are)|[Nn]either|[Ss]hould (?:it|a|the)|[Ww]ere (?:it|there|they))\b",
    "behind, beside": r"\b(?:behind|beside)\b",
    "in the place of": r"\bin (?:the|its|their|another) place\b",
    "too at the end": r", too\b",
    "which after a comma": r", (?:which|whose|whom)\b",
    "three times of": r"\bof\b(?:[^.;:]*\bof\b){2}",
    "all but": r"\b(?:but for|(?:all|none|nothing|the same) but)\b",
    "shall": r"\bshall\b",
    "picture in place of image": r"\bpictures?\b",
}
_PATTERNS = {name: re.compile(pattern, re.MULTILINE) for name, pattern in HABITS.items()}


def texts_of_code(source: str) -> Iterator[str]:
    """Yield the docstrings, strings of five words or more, and blocks of comments of a module."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            docstrings.add(node.body[0].value)
            yield text
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            text = node.value
        if len(text.split()) >= LEAST_WORDS:
            yield text
    yield from _comments(source)


def _comments(source: str) -> Iterator[str]:
    """Yield comments, those on successive lines as one text."""
    block: list[str] = []
    between = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            block.append(token.string.lstrip("#: "))
        elif block and token.type not in between:
            yield " ".join(block)
            block = []
    if block:
        yield " ".join(block)


def texts_of_page(page: str) -> Iterator[str]:
    """Yield the lines of a page, without blocks of code. X stands for code within a line."""
    in_block = False
    for line in page.splitlines():
        if line.startswith("```"):
            in_block = not in_block
        elif not in_block and line.strip() and not line.startswith("    "):
            yield re.sub(r"`[^`]*`", "X", line)


def habits_in(texts: Iterable[str]) -> tuple[Counter[str], int]:
    """Count each habit in the texts. Returns also the number of words."""
    found, words = Counter(), 0
    for text in texts:
        words += len(text.split())
        found.update({name: len(pattern.findall(text)) for name, pattern in _PATTERNS.items()})
    return found, words
