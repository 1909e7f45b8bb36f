"""Delete an extension, with all that belongs to it, in a copy of the project, and run the other tests.

    python tests/helpers/removal.py [NAME ...] [--quick] [--keep FOLDER]

An extension is its folder of llava_ds/extensions/, its tests in tests/extensions/, its page of docs/, its entry of the
table, the scripts of run/ that import it or whose docstring names its page, other tests that import it, the lines of
recipes with its flags, and of other pages the lines that link to its page, and the paragraphs and commands that name
such a script or test. One that requires it goes with it. Without names, each is deleted alone, one after the other;
a+b deletes two together. --quick collects all tests, and runs those nearest to extensions, and those that name one of
the deleted, or one of its flags.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llava_ds.extensions.table import EXTENSIONS

ROOT = Path(__file__).parents[2]
# As make test and make test-full, without CUDA.
SUITE = ["-n", os.environ.get("WORKERS", "3"), "--dist", "loadfile", "--no-loadscope-reorder"]
SUITE += ["-m", "not long and not faults and not gpu and not cuda"]
QUICK = [
    "tests/extensions/test_extensions.py",
    "tests/runtime/test_cli.py",
    "tests/config",
    "tests/checkpoint",
    "tests/train/test_hooks.py",
    "tests/model/test_llava.py",
]
QUICK += ["tests/test_imports.py", "tests/test_house.py", "tests/test_docs.py"]


def copy_of_project(folder: Path) -> None:
    """Copy the files that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def delete(folder: Path, name: str) -> None:
    """Delete an extension in a copy of the project, with those that require it, and tests that import it."""
    for other, trigger in EXTENSIONS.items():
        if name in trigger.requires.split() and (folder / "llava_ds" / "extensions" / other).exists():
            delete(folder, other)
    shutil.rmtree(folder / "llava_ds" / "extensions" / name)
    shutil.rmtree(folder / "tests" / "extensions" / name, ignore_errors=True)
    (folder / "docs" / f"{name}.md").unlink(missing_ok=True)
    flag = re.compile(rf"^({'|'.join(EXTENSIONS[name].flags.split())}):")
    for recipe in folder.glob("run/recipes/*.yaml"):
        lines = recipe.read_text().splitlines(keepends=True)
        recipe.write_text("".join(line for line in lines if not flag.match(line)))
    table = folder / "llava_ds" / "extensions" / "table.py"
    table.write_text(without_entry(table.read_text(), name))
    imports = re.compile(rf"^from llava_ds\.extensions\.{name}\b", re.MULTILINE)
    page = re.compile(rf"\bdocs/{name}\.md\b")
    sources = {path: path.read_text() for path in folder.glob("run/**/*.py")}
    scripts = [
        path
        for path, source in sources.items()
        if imports.search(source) or page.search(ast.get_docstring(ast.parse(source)) or "")
    ]
    tests = {f"test_{path.stem}.py" for path in scripts}
    tests = [path for path in folder.glob("tests/**/*.py") if path.name in tests or imports.search(path.read_text())]
    for path in (*scripts, *tests):
        path.unlink()
    named = [path.relative_to(folder).as_posix() for path in (*scripts, *tests)]
    for makefile in (folder / "Makefile", *folder.glob("llava_ds/extensions/*/targets.mk")):
        commands = re.split(r"(?<!\\)\n", makefile.read_text())  # with its continuation lines
        makefile.write_text("\n".join(line for line in commands if not any(path in line for path in named)))
    link = re.compile(rf"\]\((?:docs/)?{name}\.md[)#]")
    for page in [*folder.glob("*.md"), *folder.glob("docs/*.md"), *folder.glob("ds_configs/*.md")]:
        kept = "".join(line for line in page.read_text().splitlines(keepends=True) if not link.search(line))
        parts = (part for part in kept.split("\n\n") if not any(path in part for path in named))
        page.write_text("\n\n".join(parts))


def without_entry(source: str, name: str) -> str:
    """The source of the table without an extension's entry."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == name:
                    return "".join(lines[: key.lineno - 1] + lines[value.end_lineno :])
    raise KeyError(name)


def nearest(folder: Path, names: list[str]) -> list[str]:
    """List test files about extensions, and test files that name one of these extensions or one of its flags."""
    words = {word for name in names for word in (name, *EXTENSIONS[name].flags.split())}
    named = re.compile(rf"\b({'|'.join(words)})\b")
    found = [path for path in folder.glob("tests/**/test_*.py") if named.search(path.read_text())]
    return sorted({*(path.relative_to(folder).as_posix() for path in found), *QUICK})


def run_tests(folder: Path, names: list[str], quick: bool) -> int:
    """Regenerate the page of flags, and run the tests. Size limits stay at the whole project's."""
    environ = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "docs" / "flags.md").open("w") as page:
        subprocess.run([sys.executable, "run/dev/flags.py"], cwd=folder, env=environ, stdout=page, check=True)
    command = [sys.executable, "-m", "pytest", "--ignore=tests/test_core.py", "-p", "no:cacheprovider", *SUITE]
    if quick:
        listing = [*command, "--collect-only", "-n", "0"]
        collected = subprocess.run(listing, cwd=folder, env=environ, stdout=subprocess.PIPE)
        if collected.returncode:
            print(collected.stdout.decode())
            return collected.returncode
        command += [path for path in nearest(folder, names) if (folder / path).exists()]
    return subprocess.run(command, cwd=folder, env=environ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = sorted(path.parent.name for path in (ROOT / "llava_ds" / "extensions").glob("*/__init__.py"))
    parser.add_argument("names", nargs="*", default=folders, help="extensions, or several with + between them")
    parser.add_argument("--quick", action="store_true", help="run only the tests that are nearest to extensions")
    parser.add_argument("--keep", type=Path, help="make the copies in this folder, and leave them there")
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for names in args.names:
            folder = (args.keep or Path(scratch)) / names[:60]
            copy_of_project(folder)
            for name in names.split("+"):
                if (folder / "llava_ds" / "extensions" / name).exists():  # or gone with one that it requires
                    delete(folder, name)
            print(f"without {names}: {folder}", flush=True)
            failed += [names] * bool(run_tests(folder, names.split("+"), args.quick))
            if args.keep is None:
                shutil.rmtree(folder)
    print(f"fails without: {', '.join(failed)}" if failed else f"passes without each of {', '.join(args.names)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
