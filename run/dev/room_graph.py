"""Draw the imports between the rooms of llava_ds as a mermaid graph: python run/dev/room_graph.py [--write PAGE]

An arrow points from a room to a room that it imports. Arrows implied by a longer path are left out.
"""

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)


def room_of(path: Path) -> str:
    """Return the folder or module of llava_ds/ that a file belongs to, or run."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "run" if parts[0] == "run" else parts[1]


def imported_rooms(source: str) -> set[str]:
    """Return the rooms that a file imports from, also inside functions, but not under TYPE_CHECKING."""
    names, tree = [], ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names += [module + alias.name for alias in node.names]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "llava_ds" and len(part) > 1} - {"__version__"}


def room_imports() -> dict[str, set[str]]:
    """Map every room to the other rooms that it imports."""
    graph: dict[str, set[str]] = {}
    for path in [*(ROOT / "llava_ds").rglob("*.py"), *(ROOT / "run").rglob("*.py")]:
        room = room_of(path)
        # Skip the extensions: nothing imports their files, and each may be deleted.
        is_extension = room == "extensions" and path.parent.name != "extensions"
        if room != "__init__" and not is_extension:
            graph.setdefault(room, set()).update(imported_rooms(path.read_text(encoding="utf-8")) - {room})
    return graph


def without_shortcuts(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Drop arrows that a longer path implies. The graph has no cycles: tests/test_imports.py."""

    def reached(room: str) -> set[str]:
        return graph[room].union(*(reached(other) for other in graph[room]))

    return {room: others - set().union(*(reached(other) for other in others)) for room, others in graph.items()}


def mermaid() -> str:
    """Return the fenced block for a page."""
    graph = without_shortcuts(room_imports())
    arrows = [f"    {room} --> {' & '.join(sorted(others))}" for room, others in sorted(graph.items()) if others]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page in which to replace the mermaid block (default: print it)")
    args = parser.parse_args()
    if args.write is None:
        print(mermaid(), end="")
    else:
        args.write.write_text(BLOCK.sub(lambda _: mermaid(), args.write.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
