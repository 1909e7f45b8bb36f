"""Keep DESIGN's house rules over llava_ds/ and run/: sizes, DeepSpeed's private names, file names, docstrings."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "llava_ds").rglob("*.py"), *(ROOT / "run").rglob("*.py")])

MAX_LINES, MAX_LINES_OF_TRAIN, MAX_PARAMETERS = 60, 40, 7
MAX_SHARED_STEMS, MAX_QUESTION_SHARE = 8, 0.02
PRIVATE = tuple(f"deepspeed.{part}" for part in ("runtime", "ops", "utils", "checkpoint"))
QUESTIONS = ("What", "Whether", "How", "Where", "Who")

# Functions whose parameters a library chooses: (file, function), and the library.
DICTATED = dict.fromkeys(
    (("llava_ds/model/attention.py", name) for name in ("varlen_attention", "tower_attention")),
    "transformers' AttentionInterface",
)
# The doctor asks every op of DeepSpeed for its builder, by name.
MAY_IMPORT_PRIVATE = {name for name in ("llava_ds/extensions/doctor/software.py",) if (ROOT / name).exists()}

# Violations that are left, which may only become fewer.
LEFT = {"lines": 0, "parameters": 0, "private": 0, "stems": 0, "questions": 0.0}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(dotted name, node) of every function, methods and nested ones too."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        name = f"{prefix}{node.name}" if named else prefix.removesuffix(".")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        yield from functions(node, f"{name}." if name else "")


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters, without self and cls."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(arguments.kwonlyargs)


def long_functions(file: str, source: str) -> list[str]:
    limit = MAX_LINES_OF_TRAIN if file == "run/train.py" else MAX_LINES
    sizes = [(name, node.end_lineno - node.lineno + 1) for name, node in functions(ast.parse(source))]
    return [f"{file}: {name} has {lines} lines" for name, lines in sizes if lines > limit]


def wide_functions(file: str, source: str) -> list[str]:
    counts = [(name, num_parameters(node)) for name, node in functions(ast.parse(source))]
    return [
        f"{file}: {name} has {count} parameters"
        for name, count in counts
        if count > MAX_PARAMETERS and (file, name) not in DICTATED
    ]


def private_imports(file: str, source: str) -> list[str]:
    """Imports of DeepSpeed's private modules outside engine/ and extensions/, also within functions."""
    if file.startswith(("llava_ds/engine/", "llava_ds/extensions/")) or file in MAY_IMPORT_PRIVATE:
        return []
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [f"{file}: {name}" for name in names if any(f"{name}.".startswith(f"{part}.") for part in PRIVATE)]


def shared_stems(files: list[str]) -> list[str]:
    """File stems that occur more than once, without those that every folder of extensions/ has."""
    by_place = re.compile(r"llava_ds/extensions/\w+/(flags|extension|report|estimated)\.py")
    counts = Counter(Path(file).stem for file in files if not by_place.fullmatch(file))
    return sorted(stem for stem, count in counts.items() if count > 1 and stem != "__init__")


def docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for text in texts if text]


def is_question(docstring: str) -> bool:
    """True where the first word is one of QUESTIONS."""
    return docstring.split(maxsplit=1)[0].rstrip("',.:;") in QUESTIONS


def found_in_all(rule) -> list[str]:
    return [one for path in SOURCES for one in rule(name_of(path), path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("rule", "left"), [(long_functions, "lines"), (wide_functions, "parameters"), (private_imports, "private")]
)
def test_the_rules_of_functions_and_imports_hold(rule, left):
    found = found_in_all(rule)
    assert len(found) <= LEFT[left], "\n".join(found)


def test_few_file_names_have_two_meanings():
    shared = shared_stems([name_of(path) for path in SOURCES])
    assert len(shared) <= max(MAX_SHARED_STEMS, LEFT["stems"]), shared


def test_docstrings_say_what_a_thing_does_or_is():
    """Not in the form of a question."""
    texts = [(path, text) for path in SOURCES for text in docstrings(path.read_text(encoding="utf-8"))]
    questions = [f"{name_of(path)}: {text.splitlines()[0]}" for path, text in texts if is_question(text)]
    assert len(texts) > 500
    share = len(questions) / len(texts)
    assert share <= max(MAX_QUESTION_SHARE, LEFT["questions"]), "\n".join([f"{share:.1%}", *questions])


def test_the_exceptions_exist():
    for file, name in DICTATED:
        assert name in dict(functions(ast.parse((ROOT / file).read_text(encoding="utf-8")))), (file, name)
    assert all((ROOT / file).exists() for file in MAY_IMPORT_PRIVATE)


BODY = "    x = 1\n"


@pytest.mark.parametrize(
    ("rule", "file", "source", "seen"),
    [
        (long_functions, "llava_ds/x.py", "def f():\n" + 60 * BODY, True),
        (long_functions, "llava_ds/x.py", "def f():\n" + 59 * BODY, False),
        (long_functions, "llava_ds/x.py", "class A:\n def f(self):\n" + 60 * BODY, True),
        (long_functions, "run/train.py", "def main():\n" + 40 * BODY, True),
        (long_functions, "run/other.py", "async def main():\n" + 40 * BODY, False),
        (wide_functions, "llava_ds/x.py", "def f(a, b, c, d, e, f, g, h): 1", True),
        (wide_functions, "llava_ds/x.py", "if 1:\n def f(a, b, c, d, *, e, f, g, h): 1", True),
        (wide_functions, "llava_ds/x.py", "class A:\n def f(self, a, b, c, d, e, f, g): 1", False),
        (private_imports, "llava_ds/train/x.py", "def f():\n from deepspeed.runtime import zero", True),
        (private_imports, "llava_ds/train/x.py", "import deepspeed.utils", True),
        (private_imports, "llava_ds/train/x.py", "from deepspeed import ops", True),
        (private_imports, "run/x.py", "from deepspeed.checkpoint.constants import A", True),
        (private_imports, "llava_ds/train/x.py", "import deepspeed.comm\nfrom deepspeed import zero", False),
        (private_imports, "llava_ds/engine/x.py", "import deepspeed.runtime.engine", False),
    ],
)
def test_a_violation_is_seen(rule, file, source, seen):
    assert bool(rule(file, source)) == seen


def test_a_shared_stem_is_seen():
    assert shared_stems(["a/x.py", "b/x.py", "a/y.py", "a/__init__.py", "b/__init__.py"]) == ["x"]


def test_a_question_is_seen():
    module, function = '"""What it is."""\nclass A:\n    """Where: there."""\n', 'def f():\n    """Whatever it is."""\n'
    nested = '    def g():\n        "How so."'
    assert [is_question(text) for text in docstrings(module + function + nested)] == [True, True, False, True]
