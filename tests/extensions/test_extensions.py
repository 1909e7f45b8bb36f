"""Extensions: the table says what the folders declare, they load on demand, and a slip in one ends the run by name."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from ds_json import CONFIGS, arguments

from llava_ds.config.arguments import FLAGS, declared_by, flag_default
from llava_ds.config.bounds import bounds_of
from llava_ds.config.flags import flags_of
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions import active as loading
from llava_ds.extensions import table
from llava_ds.extensions.active import active, flags_class, owners
from llava_ds.extensions.architecture import FolderPart
from llava_ds.extensions.base import Extension, ExtensionFlags, Hook, Phase
from llava_ds.extensions.table import EXTENSIONS, Trigger

ROOT = Path(__file__).parents[2]
NEEDED = ["--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json")]
FEATURES = {
    path.parent.name: {name: value for name, value in flags.items() if name != "stage"}  # of ZeRO, for pairs alone
    for path in sorted(Path(__file__).parent.glob("*/features.json"))
    for flags in json.loads(path.read_text()).values()
}


def test_every_folder_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "llava_ds" / "extensions").glob("*/__init__.py")}
    assert folders == EXTENSIONS.keys()


@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_table_has_the_flags_that_the_folder_declares(name):
    fields = dataclasses.fields(flags_class(name))
    names = [word for each in fields for word in (each.name, *each.metadata.get("aliases", ()))]
    spelled = [word.removeprefix("--") for word in names]
    spelled += [f"no_{each.name}" for each in fields if each.default is True]
    assert sorted(EXTENSIONS[name].flags.split()) == sorted(spelled)
    declared = declared_by(flags_class(name))
    assert {flag.group for flag in declared.values()} <= {name}
    scripts = [path for path in (ROOT / "run").glob("*.py") if f"llava_ds.extensions.{name}." in path.read_text()]
    assert EXTENSIONS[name].flags or EXTENSIONS[name].values or EXTENSIONS[name].model_types or scripts
    added = {value for own in EXTENSIONS[name].adds.values() for value in own}
    for flag in declared.values():
        assert set(flag.goes_with.split()) <= added and bool(flag.goes_with) == bool(added)
    others = [other for other in EXTENSIONS if other != name and not together(EXTENSIONS[name], EXTENSIONS[other])]
    assert not set(spelled) & {*FLAGS, *(flag for other in others for flag in EXTENSIONS[other].flags.split())}


def together(one: Trigger, other: Trigger) -> bool:
    """Whether both add values to one flag, of which a run has one."""
    return bool(one.adds.keys() & other.adds.keys())


@pytest.mark.parametrize("name", [name for name in EXTENSIONS if flags_class(name).numbers])
def test_the_page_of_an_extension_names_its_numbers(name):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert [number for number in flags_class(name).numbers if f"`{number}`" not in page] == []


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_extension_loads(name):
    assert len(active([name]).extensions) == 1


@pytest.mark.parametrize(
    ("name", "flag", "what"),
    [(name, flag, what) for name in EXTENSIONS for flag, what in flags_class(name).zeros.items()],
)
def test_a_zero_says_what_it_switches_off_or_is_refused_with_what_does(name, flag, what):
    bounds = bounds_of(flags_class(name))[flag]
    if EXTENSIONS[name].adds:
        return  # its own tests give what else the value needs
    if bounds.holds(0):
        assert parse_arguments([*NEEDED, f"--{flag}", "0"])[1] == [f"--{flag} 0: {what}"]
        assert parse_arguments(NEEDED, defaults={flag: 0})[1] == []
        return
    with pytest.raises(ConfigError) as refused:
        parse_arguments([*NEEDED, f"--{flag}", "0"])
    assert f"--{flag} is 0: give 1 or more; {what}" in str(refused.value)


LOADED = """
import sys
from llava_ds.config.parsing import parse_arguments
args = parse_arguments(sys.argv[1:])[0]
print(sorted(args.own), sorted(n for n in sys.modules if n.startswith("llava_ds.extensions.") and n.count(".") > 2))
"""


def after_parsing(*flags: str) -> str:
    command = [sys.executable, "-c", LOADED, *NEEDED, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_flags_that_nobody_gives_are_not_even_declared(tmp_path):
    plain = after_parsing()
    by_flags = [name for name, trigger in EXTENSIONS.items() if not trigger.always and not trigger.adds]
    demanded = [name for name in by_flags if FEATURES.get(name)]
    assert not any(f"extensions.{name}." in plain for name in demanded)
    alone = [name for name in demanded if len(FEATURES[name]) == 1 and flag_default(*FEATURES[name]) is not None]
    for name in alone[:1]:
        flag, value = next(iter(FEATURES[name].items()))
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"{flag}: {value}\n")
        spelled = [f"--{flag.replace('_', '-')}={value}"]
        for words in ([f"--{flag}", str(value)], spelled, ["--recipe", str(recipe)]):
            found = after_parsing(*words)
            assert f"'{name}'" in found and f"extensions.{name}.flags" in found  # and not its code
            assert f"extensions.{name}.extension" not in found
        assert f"'{name}'" not in after_parsing(f"--{flag}", str(flag_default(flag)))


def test_an_argument_that_is_replaced_loads_what_it_belongs_to():
    args = arguments()
    for name, flags in FEATURES.items():
        changed = args.replaced(**flags)
        assert name in changed.own and changed.as_dict().items() >= flags.items()
        assert changed.replaced(**{flag: flag_default(flag) for flag in flags}) == args


@dataclasses.dataclass(frozen=True)
class Flags(ExtensionFlags):
    mine: int = flags_of("mine")[0](0, "A number.")


@dataclasses.dataclass(frozen=True)
class MisspelledFlags(Flags):
    def problms(self, args) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True)
class NeedyFlags(Flags):
    needs: ClassVar = {"dense_mlp": "why not"}


@dataclasses.dataclass(frozen=True)
class GreedyFlags(Flags):
    breaks: ClassVar = ("whole_layer",)


class MisspelledFolders(FolderPart):
    def missin(self, config: dict) -> None:
        pass


class Misspelled(Hook):
    def after_stepp(self, end) -> None:
        pass


@pytest.fixture
def mine(monkeypatch):
    """A function that makes an extension `mine` of two modules' names."""

    def made(flags: dict, code: dict | None = None) -> None:
        monkeypatch.setitem(table.EXTENSIONS, "mine", Trigger("mine", "mine"))
        for part, names in {"flags": flags, "extension": code or {}}.items():
            module = ModuleType(part)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, f"llava_ds.extensions.mine.{part}", module)
        monkeypatch.setitem(sys.modules, "llava_ds.extensions.mine", ModuleType("mine"))

    return made


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"Flag": Flags}, "mine/flags.py has no Flags: did you mean Flag?"),
        ({"Flags": MisspelledFlags}, "Flags: nothing reads problms: did you mean problems?"),
        ({"Flags": NeedyFlags}, "unknown property 'dense_mlp': did you mean dense_mlps?"),
        ({"Flags": GreedyFlags}, "unknown property 'whole_layer': did you mean whole_layers?"),
    ],
)
def test_a_slip_in_an_extensions_flags_is_named(mine, flags, message):
    mine(flags)
    with pytest.raises(ConfigError) as refused:
        parse_arguments([*NEEDED, "--mine", "3"])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"extensions": Extension()}, "mine/extension.py has no extension: did you mean extensions?"),
        (
            {"extension": Extension(hooks=((Phase.LOG, Misspelled),))},
            "Misspelled: nothing reads after_stepp: did you mean after_step?",
        ),
        ({"extension": Extension(folder=MisspelledFolders())}, "nothing reads missin: did you mean missing?"),
        ({"extension": Extension(hooks=((2, Misspelled),))}, "Misspelled: a hook is a pair of a Phase"),
        ({"extension": Extension(hooks=((Phase.LOG, print),))}, "print: a hook is a pair of a Phase"),
    ],
)
def test_a_slip_in_an_extensions_code_is_named(mine, code, message):
    mine({"Flags": Flags}, code)
    own = parse_arguments([*NEEDED, "--mine", "3"])[0].own
    assert own["mine"].mine == 3
    with pytest.raises(ConfigError) as refused:
        active(own)
    assert message in str(refused.value)


def test_an_unknown_slot_or_an_error_ends_the_run_with_the_files_name(monkeypatch):
    monkeypatch.setitem(table.EXTENSIONS, "mine", Trigger("mine", "mine"))

    def failing(name: str) -> None:
        Extension(hoks=())

    monkeypatch.setattr(loading.importlib, "import_module", failing)
    with pytest.raises(ConfigError, match=r"extensions/mine/extension\.py can't be loaded: TypeError: .*'hoks'"):
        active(["mine"])


def test_owners_are_found_by_any_spelling():
    for name, trigger in EXTENSIONS.items():
        assert all(name in owners([flag]) for flag in trigger.flags.split())
    assert owners(["learning_rate", "no_such_flag"]) == []
