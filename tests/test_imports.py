"""DESIGN's import order, read from the source: nothing is imported, so nothing can hide behind a condition."""

import ast
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from llava_ds.extensions.table import EXTENSIONS

ROOT = Path(__file__).parents[1]

# From left to right; what stands on one level does not import each other.
LEVELS = [
    {"constants"},
    {"extensions"},  # their interface, and what loads them by the table
    {"boxes", "files"},
    {"template_variables"},
    {"config"},
    {"runtime"},
    {"tilings"},
    {"anyres", "layouts", "sentencepiece", "videos"},
    {"batch", "geometry", "tokenizer"},
    {"data", "model"},
    {"engine"},
    {"checkpoint", "second_models", "tracking"},
    {"export", "tiny"},
    {"train"},
    {"extensions/*"},  # the folders: nothing imports them
    {"run"},
]
INTERFACE = (
    "active",
    "architecture",
    "base",
    "missing_plugins",
    "plugin_slots",
    "table",
)  # the core may import them
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FOR_FLAGS = tuple(
    f"llava_ds.{name}." for name in ("config.arguments", "config.bounds", "config.flags", "extensions.base")
)
OPTIONAL = {"flash_attn", "flash_attn_interface", "peft", "bitsandbytes", "wandb", "gradio", "liger_kernel", "av"} | {
    "fastapi",
    "starlette",
    "uvicorn",
}

SOURCES = sorted([*(ROOT / "llava_ds").rglob("*.py"), *(ROOT / "run").rglob("*.py")])


def imported_by(path: Path, source: str) -> list[str]:
    """Dotted names of all that a file imports. The interface of extensions may name types of what comes after it."""
    tree = ast.parse(source)
    if part_of(path) == "extensions":
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and is_for_types(node))]
    return imported(tree)


def is_for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree: ast.AST) -> list[str]:
    """Dotted names of all that a piece of source imports; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def part_of(path: Path) -> str:
    """The package or module of the order that a file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "run" if parts[0] == "run" else place_of(parts[1:])


def place_of(parts: Sequence[str]) -> str:
    """The place in the order of a module of llava_ds, by the parts of its name."""
    return "extensions/*" if parts[0] == "extensions" and parts[1] not in (*INTERFACE, "__init__") else parts[0]


def wrong_imports(path: Path, source: str) -> list[str]:
    own, scripts_of = part_of(path), set()
    if own == "__init__":  # the package itself: nothing that would run before the rest
        return imported(ast.parse(source))
    wrong = []
    for name in imported_by(path, source):
        top, _, rest = name.partition(".")
        if top == "run" or name.startswith("."):
            wrong.append(name)
        if top != "llava_ds":
            continue
        other = place_of(rest.split("."))
        if own == other == "extensions/*":  # one extension imports no other, but those that it requires
            mine = path.relative_to(ROOT).parts[2]
            wrong += [name] * (rest.split(".")[1] not in (mine, *required_by(mine)))
        elif other == "extensions/*" and own == "run":  # a script belongs to one extension at most
            scripts_of.add(rest.split(".")[1])
        elif other == "extensions/*" or (
            other not in ("__version__", own) and LEVEL.get(other, len(LEVELS)) >= LEVEL[own]
        ):
            wrong.append(name)
        if path.name == "flags.py" and own == "extensions/*":  # read with the command line
            folder = f"llava_ds.extensions.{path.relative_to(ROOT).parts[2]}."  # within functions
            wrong += [name] * (not name.startswith((*FOR_FLAGS, folder)))
    several = scripts_of - {other for name in scripts_of for other in required_by(name)}
    return wrong + sorted(several) * (len(several) > 1)


def required_by(name: str) -> list[str]:
    return EXTENSIONS[name].requires.split() if name in EXTENSIONS else []


def runs_at_import(tree: ast.Module) -> list[ast.stmt]:
    """All statements that run when the module is imported: those outside functions, also in `if`, `try` and classes."""
    todo, found = list(tree.body), []
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
    return found


def test_every_module_has_a_place_in_the_order():
    assert len(SOURCES) > 30
    assert {part_of(path) for path in SOURCES} - {"__init__"} <= set(LEVEL)


def test_a_module_imports_only_from_the_left():
    wrong = {path.relative_to(ROOT): wrong_imports(path, path.read_text(encoding="utf-8")) for path in SOURCES}
    assert not any(wrong.values()), {path: names for path, names in wrong.items() if names}


def test_optional_packages_are_imported_where_they_are_needed():
    wrong = []
    for path in SOURCES:
        statements = runs_at_import(ast.parse(path.read_text(encoding="utf-8")))
        at_top = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {name.split(".")[0] for node in at_top for name in imported(node)}
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(OPTIONAL & names)]
    assert not wrong


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {}
    for path in SOURCES:
        names = imported_by(path, path.read_text(encoding="utf-8"))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = {known for name in names for known in (name, name.rpartition(".")[0])}
    order: list[str] = []
    for _ in graph:  # take modules whose imports are all placed, until none is left
        order += [module for module in graph if module not in order and not (graph[module] & set(graph)) - set(order)]
    # run.x is a script beside others of its name: only the package's modules have to come out.
    assert {module for module in graph if module.startswith("llava_ds.")} <= set(order)


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("llava_ds/data/x.py", "from llava_ds.model import build", True),
        ("llava_ds/data/x.py", "def f():\n    import llava_ds.train.loop", True),
        ("llava_ds/data/x.py", "from llava_ds import model", True),
        ("llava_ds/data/x.py", "from . import images", True),
        ("llava_ds/data/x.py", "from llava_ds.data import images", False),
        ("llava_ds/model/x.py", "from llava_ds import geometry", False),
        ("llava_ds/geometry.py", "import llava_ds.batch", True),
        ("llava_ds/checkpoint/x.py", "from llava_ds.train import loop", True),
        ("llava_ds/train/x.py", "from llava_ds.data.loader import Window", False),
        ("llava_ds/extensions/infer/x.py", "from run.train import main", True),
        ("llava_ds/__init__.py", "import torch", True),
        ("run/x.py", "from llava_ds.tiny import default", False),
        ("llava_ds/train/x.py", "from llava_ds.extensions.base import Hook", False),
        ("llava_ds/train/x.py", "from llava_ds.extensions.ema import averages", True),
        ("run/x.py", "from llava_ds.extensions.ema import averages", False),
        ("run/x.py", "from llava_ds.extensions.ema import a\nfrom llava_ds.extensions.spikes import b", True),
        ("llava_ds/extensions/a/x.py", "from llava_ds.extensions.b import c", True),
        ("llava_ds/extensions/a/x.py", "from llava_ds.extensions.a import c", False),
        ("llava_ds/extensions/a/x.py", "from llava_ds.train import state", False),
        ("llava_ds/extensions/a/flags.py", "from llava_ds.config.flags import flags_of", False),
        ("llava_ds/extensions/a/flags.py", "from llava_ds.config.rules import problems_of", True),
        ("llava_ds/extensions/base.py", "from llava_ds.config.flags import flags_of", True),
    ],
)
def test_this_check_sees_a_wrong_import(file, source, wrong):
    assert bool(wrong_imports(ROOT / file, source)) == wrong


def test_this_check_sees_what_runs_at_import():
    source = "try:\n    import peft\nexcept ImportError:\n    import wandb\ndef f():\n    import gradio\n"
    names = [imported(node) for node in runs_at_import(ast.parse(source)) if isinstance(node, ast.Import)]
    assert sorted(itertools.chain(*names)) == ["peft", "wandb"]
