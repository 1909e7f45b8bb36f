"""--plugin: a file beside the data is an extension, and a slip in it is refused by name."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from ds_json import CONFIGS
from llavas import arguments
from safetensors.torch import save_file

from llava_ds.checkpoint.base_weights import weight_hashes
from llava_ds.config.arguments import every_flag
from llava_ds.config.parsing import build_parser, parse_arguments
from llava_ds.config.plugin_calls import described, error_of_plugin, last_returned, place
from llava_ds.config.plugins import load
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import collate
from llava_ds.extensions.active import active, flags_class, plugin_entries, plugins
from llava_ds.extensions.missing_plugins import refuse_missing
from llava_ds.extensions.plugins.hidden_loss import _Beside
from llava_ds.extensions.plugins.proof import _different
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.files.model_files import read_config

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "plugins").glob("*.py"))
NO_FLAGS = "from llava_ds.extensions.base import *\nfrom llava_ds.extensions.plugin_slots import *\n"
DIFFERS = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Flags(ExtensionFlags):
    differs = "it adds"
extension = Extension()
"""
DIFFERS = NO_FLAGS + DIFFERS
PROJECTOR = """
class Kind(ProjectorKind):
    def build(self, option, tower_width, width): ...
extension = Extension(choices={'mm_projector_type': Kind()})
"""
PROJECTOR = NO_FLAGS + PROJECTOR
NEEDED = ["--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json")]
FLAGS = """
from dataclasses import dataclass
from typing import ClassVar
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import *
from llava_ds.extensions.plugin_slots import *
from llava_ds.extensions.plugins.attention_rule import AttentionRule
from llava_ds.extensions.plugins.content_tokens import ContentTokens
_idea, _free = flags_of("idea")

@dataclass(frozen=True)
class Flags(ExtensionFlags):
    idea_size: int = _idea(3, "Size of the idea.")
"""
WHOLE = FLAGS + "\nextension = Extension()\n"


@pytest.fixture(autouse=True)
def nothing_stays_loaded():
    yield
    load([])
    assert not plugins()


def write(folder: Path, text: str, name: str = "idea") -> str:
    file = folder / f"{name}.py"
    file.write_text(text)
    return str(file)


def parse(*argv: str):
    return parse_arguments([*argv, *NEEDED])[0]


def test_its_flags_are_read_and_a_run_without_it_has_none(tmp_path):
    file = write(tmp_path, WHOLE)
    args = parse("--plugin", file, "--idea_size", "5")
    assert args.own["idea"].idea_size == 5 and args.training.plugin == file
    assert "idea" in active(args.own).extensions and "idea_size" in every_flag()
    assert "idea" not in parse().own
    assert "idea_size" not in every_flag()
    assert parse("--plugin", file).own["idea"].idea_size == 3  # it acts without a flag of its own


def test_several_files_and_those_of_a_recipe(tmp_path):
    one, two = (
        write(tmp_path, WHOLE),
        write(tmp_path, "from llava_ds.extensions.base import *\nextension = Extension()", "two"),
    )
    for given in (["--plugin", one, two], ["--plugin", one, "--plugin", two], [f"--plugin={one},{two}"]):
        assert parse(*given).training.plugin == f"{one},{two}"
        assert [*plugins()] == ["idea", "two"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"plugin: {one}\nidea_size: 7\n")
    assert parse("--recipe", str(recipe)).own["idea"].idea_size == 7


def test_help_has_its_flags(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse("--plugin", write(tmp_path, '"""An idea of mine."""\n' + WHOLE), "--help", "idea")
    shown = capsys.readouterr().out
    assert "idea: An idea of mine:" in shown and "--idea_size" in shown and "--learning_rate" not in shown
    assert "--idea_size" in build_parser().format_help("all")


def test_a_misspelled_flag_of_it_gets_a_hint(tmp_path):
    with pytest.raises(ConfigError, match="unknown flag --idea_sizes: did you mean --idea_size"):
        parse("--plugin", write(tmp_path, WHOLE), "--idea_sizes", "5")


GIVE = "give a function with the arguments in"
CLASS = "class Own({base}):\n    def {method}(self): ...\n"


def with_slots(slots: str) -> str:
    return f"{FLAGS}\nextension = Extension({slots})\n"


def with_class(base: str, method: str, slot: str) -> str:
    return FLAGS + CLASS.format(base=base, method=method) + f"extension = Extension({slot})\n"


BROKEN = {
    "import nothing_here": "idea.py:1 in <module>: ModuleNotFoundError: No module named 'nothing_here'",
    "x = (": "idea.py:1: SyntaxError: '(' was never closed",
    "\nraise SystemExit(3)": "idea.py:2 in <module>: SystemExit: 3",
    "x = 1": "has no value named extension: write extension = Extension(...)",
    "extension = 3": "has extension = 3: write",
    with_slots("hoks=()"): "unexpected keyword argument 'hoks': did you mean hooks",
    with_slots("zzz=1"): "'zzz': the slots are check, fits, plan, choices",
    **{
        with_slots(f"{slot}=1"): f"idea.py: {slot}: {GIVE}"
        for slot in ("check", "fits", "plan", "open_data", "complete", "module", "objective")
    },
    with_slots("wrap=1"): "idea.py: int: give a value of a class of extensions/base.py's Wrap",
    with_slots("fields=1"): "idea.py: fields: give a value of extensions/plugin_slots.py's RecordFields",
    with_slots("adapter=1"): "idea.py: adapter: give a value of extensions/base.py's Adapter",
    with_slots("state=1"): "idea.py: state: give a value of extensions/base.py's StatePart",
    with_slots("mesh=1"): "idea.py: mesh: give a value of extensions/base.py's MeshPart",
    with_slots("part=1"): "idea.py: part: give a class of extensions/base.py's SessionPart",
    with_slots("hooks=((Phase.LOG, int),)"): "idea.py: int: a hook is a pair of a Phase",
    **{
        with_slots(f"{slot}=print"): f"{slot} of a plugin is never called"
        for slot in ("store", "folder", "open_folder", "text")
    },
    with_slots("choices={'mm_projector': 1}"): "'mm_projector': did you mean mm_projector_type",
    with_slots("choices={'mm_projector_type': 1}"): "a value of a class of extensions/plugin_slots.py's ProjectorKind",
    with_class("SessionPart", "build", "part=Own"): "Own: nothing reads build: did you mean built",
    with_class("Wrap", "fill", "wrap=Own()"): "Own: nothing reads fill: did you mean filled",
    with_class("AttentionRule", "mark", "part=Own"): "Own: nothing reads mark: did you mean marks",
    with_class("ContentTokens", "chose", "part=Own"): "Own: nothing reads chose: did you mean choose",
    with_class("RecordFields", "conver", "fields=Own()"): "Own: nothing reads conver: did you mean convert",
    with_class("ProjectorKind", "strides", "choices={'mm_projector_type': Own()}"): "strides: did you mean stride",
    with_class("Hook", "after_steps", "hooks=((Phase.LOG, Own),)"): "reads after_steps: did you mean after_step",
    with_class("SessionPart", "built", "part=Own"): "Own.built takes (self), but is called with (self, model): write",
    with_class("Hook", "after_step", "hooks=((Phase.LOG, Own),)"): "Own.after_step takes (self), but is called with",
    with_class("Wrap", "trains", "wrap=Own()"): "Own.trains takes (self), but is called with (self, model, args)",
    with_class("RecordFields", "load", "fields=Own()"): "Own.load takes (self), but is called with (self, values)",
    with_class("ProjectorKind", "stride", "choices={'mm_projector_type': Own()}"): "is called with (self, option)",
    with_class("ProjectorKind", "_own", "choices={'mm_projector_type': Own()}"): "Own has no build: define build(self,",
    with_class("AttentionRule", "_own", "part=Own"): "idea.py: Own has no marks: define marks(self, batch",
    with_class("ContentTokens", "_own", "part=Own"): "idea.py: Own has no choose: define choose(self, model",
    with_slots("module=lambda text: None"): "takes (text), but is called with (PreTrainedConfig, TowerPlan, ModelArg",
    with_slots("hooks=(Phase.LOG, Hook)"): "hooks: give pairs of a Phase and a class: ((Phase.LOG, MyHook),)",
    FLAGS
    + "class Own(RecordFields):\n    names = ('side')\nextension = Extension(fields=Own())": "tuple of keys: ('side',)",
    WHOLE + "Flags.needz = {}": "Flags: nothing reads needz: did you mean needs",
    WHOLE + "Flags.needs = {'whole': ''}": "unknown property 'whole': did you mean whole_",
    WHOLE.replace("@dataclass(frozen=True)\n", ""): "Flags: give a frozen dataclass of extensions/base.py's Ext",
    WHOLE + "Flags.numbers = {'a': 'title'}": "Flags.numbers has 'title' ('str' object has no attribute 'bar'): give",
    WHOLE + "Flags.numbers = {'a': Number('A', '{:q}')}": "format code 'q' for object of type 'float'): give a Number",
    WHOLE + "Flags.needs = ['whole_matrices']": "Flags.needs is ['whole_matrices'], expected Mapping",
    FLAGS
    + "class Own(SessionPart):\n    updates = 0\nextension = Extension(part=Own)": "Own.updates is 0, expected int f",
    WHOLE.replace(
        "    idea_size", "    def module_rate(self): ...\n    idea_size"
    ): "is a property: write @property above",
    WHOLE.replace("Size", "50% of it"): "Flags.idea_size: write % in its help as %% (",
    WHOLE.replace("class Flags", "class Mine"): "nothing reads the flags of Mine: name the class Flags",
    FLAGS + "extension = Extension(choices=(1, 2))": "choices is (1, 2): give {'mm_projector_type': MyKind()}",
    FLAGS
    + "extension = Extension(state=StatePart('../a.pt', dict))": "state: file is '../a.pt': give a name of its own",
    FLAGS + "extension = Extension(mesh=MeshPart('a'))": "nothing reads mesh without an axis: define Flags.axis",
    FLAGS + "extension = Extension(adapter=Adapter())": "adapter: give a value of extensions/base.py's Adapter",
    FLAGS + "extension = Extension(hooks=Hook)": "hooks: give pairs of a Phase and a class",
    FLAGS
    + "class Own(RecordFields):\n    names = (1,)\nextension = Extension(fields=Own())": "names is (1,): give a tuple",
    WHOLE + "Flags.differs = True": "Flags.differs is True, expected str",
    FLAGS
    + "class Own:\n    def __init__(self, one): ...\nextension = Extension(objective=Own)": "idea.py: Own takes (one",
    "x = '\x00'": "idea.py:1: SyntaxError: source code string cannot contain null bytes",
    WHOLE + "class Flags: ...": "Flags: give a frozen dataclass of extensions/base.py's ExtensionFlags",
    WHOLE.replace('flags_of("idea")', 'flags_of("run")'): 'Flags.idea_size: declare it by a function from flags_of("id',
    WHOLE.replace("idea_size", "learning_rate"): "--learning_rate is a flag of the core: give it another name",
    WHOLE.replace("idea_size", "ema_decay"): "--ema_decay is a flag of ema: give it another name",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_refused_with_the_reason(tmp_path, text):
    if "ema_decay" in text and "ema" not in EXTENSIONS:
        pytest.skip("there is no extension ema")
    with pytest.raises(ConfigError) as caught:
        parse("--plugin", write(tmp_path, text))
    assert BROKEN[text] in str(caught.value)
    assert not plugins()


WINDOWS = "class Own(SessionPart):\n    def windows(self, engine, done, plain): {}\nextension = Extension(part=Own)"
STEPS = SimpleNamespace(plan=SimpleNamespace(steps=SimpleNamespace(num_steps=2)))  # a part
PLAIN = [SimpleNamespace(micro_batches=[toys.nn.Identity()])]  # its windows
# By slot: what follows FLAGS, a call of it, and what is said of its result.
RESULTS = {
    "module": ("extension = Extension(module=lambda *_: None)", lambda one: one.module(1, 2, 3), "nn.Module"),
    "dtype": (
        "import torch\nextension = Extension(module=lambda *_: torch.nn.Linear(2, 1).half())",
        lambda one: one.module(1, 2, 3),
        "float32, the model's",
    ),
    "objective": ("extension = Extension(objective=lambda *_: 3)", lambda one: one.objective(1, 2, 3), "Objective"),
    "check": ("extension = Extension(check=lambda _: None)", lambda one: one.check(1), "Iterator[str]"),
    "a text": ("extension = Extension(check=lambda _: 'no')", lambda one: one.check(1), "Iterator[str]"),
    "a state without parameters": (
        "import torch\nclass Own(torch.nn.Linear):\n    def state_dict(self, *_, **__): return {}\n"
        "extension = Extension(module=lambda *_: Own(2, 1))",
        lambda one: one.module(1, 2, 3),
        "its parameters, bias, weight: leave state_dict()",
    ),
    "open_data": ("extension = Extension(open_data=lambda: None)", lambda one: one.open_data(), "EncodedDataset"),
    "windows": (
        "class Own(SessionPart):\n    def windows(self, *_): ...\nextension = Extension(part=Own)",
        lambda one: one.part.windows(None, 1, 2, 3),
        "Iterator[Window]",
    ),
    "groups": (
        "class Own(Wrap):\n    def groups(self, groups): ...\nextension = Extension(wrap=Own())",
        lambda one: one.wrap.groups([]),
        "list[dict]",
    ),
    "load": (
        "class Own(RecordFields):\n    def load(self, values): return [3]\nextension = Extension(fields=Own())",
        lambda one: one.fields.load({}),
        "Mapping[str, Tensor]",
    ),
    "element": (
        "extension = Extension(check=lambda _: [3])",
        lambda one: list(one.check(1)),
        "elements of Iterator[str]",
    ),
    "windows of numbers": (
        "class Own(SessionPart):\n    def windows(self, *_): return [3]\nextension = Extension(part=Own)",
        lambda one: list(one.part.windows(None, 1, 2, 3)),
        "elements of Iterator[Window]",
    ),
    "an empty window": (
        "from types import SimpleNamespace as Empty\nclass Own(SessionPart):\n"
        "    def windows(self, *_): yield Empty(micro_batches=[])\nextension = Extension(part=Own)",
        lambda one: list(one.part.windows(None, 1, 2, 3)),
        "windows with micro-batches",
    ),
    "a window twice": (
        WINDOWS.format("yield from [*plain, *plain]"),
        lambda one: list(one.part.windows(STEPS, None, 0, PLAIN)),
        "each once",
    ),
    "too few windows": (
        WINDOWS.format("yield from plain"),
        lambda one: list(one.part.windows(STEPS, None, 0, PLAIN)),
        "one for each of the 2 steps left",
    ),
    "groups without a rate": (
        "class Own(Wrap):\n    def groups(self, groups): return [{'params': []}]\nextension = Extension(wrap=Own())",
        lambda one: one.wrap.groups([]),
        "groups that have params and lr",
    ),
    "a parameter twice": (
        "class Own(Wrap):\n    def groups(self, groups): return [*groups, *groups]\nextension = Extension(wrap=Own())",
        lambda one: one.wrap.groups([{"params": [torch.ones(1)], "lr": 1.0}]),
        "groups that have params and lr, like the argument: each parameter once",
    ),
    "no values": (
        "import torch\nextension = Extension(module=lambda *_: torch.nn.LazyLinear(1))",
        lambda one: one.module(1, 2, 3),
        "values in weight: give its shape",
    ),
    "no state": (
        "extension = Extension(state=StatePart('idea.pt', lambda model: {'a': 3}))",
        lambda one: one.state.of(None),
        "dict[str, Tensor]",
    ),
    "another key": (
        "class Own(RecordFields):\n    names = ('a',)\n    def load(self, values): return {'b': 3}\n"
        "extension = Extension(fields=Own())",
        lambda one: one.fields.load({}),
        "one of a",
    ),
    "a number": (
        "class Own(RecordFields):\n    names = ('a',)\n    def load(self, values): return {'a': 3}\n"
        "extension = Extension(fields=Own())",
        lambda one: one.fields.load({}),
        "a tensor on the CPU as 'a'",
    ),
    "no stride": (
        PROJECTOR.replace("def build", "def stride(self, option): return 0\n    def build"),
        lambda one: one.choices["mm_projector_type"].stride("4"),
        "a number from 1",
    ),
    "stride": (
        PROJECTOR.replace("def build", "def stride(self, option): return '2'\n    def build"),
        lambda one: one.choices["mm_projector_type"].stride("4"),
        "int",
    ),
}


@pytest.mark.parametrize("slot", RESULTS)
def test_a_wrong_result_is_refused_with_its_function(tmp_path, slot):
    text, call, expected = RESULTS[slot]
    load([write(tmp_path, FLAGS + text)])
    with pytest.raises(
        (ConfigError, DataError),
        match=r"idea.py:\d+ in .* (returned|yields) .*(, expected |without )" + re.escape(expected),
    ):
        call(active(["idea"]).extensions["idea"])


@pytest.mark.full
def test_a_plugin_cannot_end_the_run_as_if_it_were_done(tmp_path):
    code = (
        "import sys\nfrom llava_ds.config.plugins import load\nfrom llava_ds.extensions.active import active\n"
        "from llava_ds.runtime.command import exit_with\nload(sys.argv[1:])\n"
        "exit_with(lambda: active(['idea']).extensions['idea'].check(1), 'run/train.py')"
    )
    file = write(tmp_path, FLAGS + "import sys\nextension = Extension(check=lambda _: sys.exit(0))")
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True)
    assert done.returncode == 2 and "in <lambda>: SystemExit: 0" in done.stderr


def test_an_error_names_the_plugins_line(tmp_path):
    text = """
class Own(Hook):
    def after_step(self, end): return {}[end]
class Fields(RecordFields):
    def load(self, values): return {"side": values["sdie"]}
def at(batch): return batch.extra["idea.sdie"]
extension = Extension(hooks=((Phase.LOG, Own),), fields=Fields(), plan=at, module=lambda *_: 1 / 0)
"""
    load([write(tmp_path, FLAGS + text)])
    one = active(["idea"]).extensions["idea"]
    assert "idea.py:20 in <lambda>" in place(one.module)
    with pytest.raises(ConfigError, match=r"idea.py:20 in <lambda>: ZeroDivisionError: division by zero"):
        one.module(1, 2, 3)
    with pytest.raises(DataError, match=r"idea.py:18 in Fields.load: KeyError: 'sdie'$"):
        one.fields.load({})
    batch = SimpleNamespace(extra={"idea.side": [None]})
    for call, said in (
        (lambda: one.hooks[0][1].after_step(None, 3), "idea.py:16 in Own.after_step: KeyError: 3"),
        (
            lambda: one.plan(batch),
            "idea.py:19 in at: KeyError: 'idea.sdie' is no key of Batch.extra, which has idea.side",
        ),
    ):
        with pytest.raises(KeyError) as caught:
            call()
        assert error_of_plugin(caught.value).endswith(said)
    assert error_of_plugin(ValueError()) is None


SHOWN = "((float32 (2,) on cpu), None, {1: float32 (2,) on cpu})"


def test_what_a_plugin_returned_last_is_known(tmp_path):
    load(
        [
            write(
                tmp_path,
                FLAGS + "def both(*given): return given, None, {1: given[0]}\nextension = Extension(plan=both)",
            )
        ]
    )
    with last_returned() as last:
        active(["idea"]).extensions["idea"].plan(torch.ones(2))
    assert place(*last[:2]).endswith("idea.py:14 in both") and described(last[2]) == SHOWN
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    ("at", "values", "said"),
    [
        (lambda batch: batch.input_ids[0] > 0, None, r"bool \(5,\) on cpu, expected positions .* nonzero"),
        (
            lambda _: torch.arange(3),
            lambda _, hidden, __: hidden[:, :1],
            r"float32 \(3, 1\) on cpu, expected a loss for",
        ),
        (
            lambda _: torch.arange(3),
            lambda _, hidden, __: hidden.mean(),
            r"float32 \(\) on cpu, expected a loss for each",
        ),
        (lambda _: torch.arange(3), lambda *_: None, "None, expected a loss for each position, \\(3,\\) on cpu"),
    ],
)
def test_a_hidden_loss_of_another_shape_is_refused(at, values, said):
    head = SimpleNamespace(positions=lambda _: torch.arange(0))
    beside, batch = _Beside(lambda *_: 0, at, values), SimpleNamespace(input_ids=torch.ones(1, 5))
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(beside, head=head).positions(batch)
        beside(None, torch.ones(3, 2), batch)


def test_the_samples_of_the_check_differ():
    numbers = {
        "num_targets": [5, 5, 9, 90, 0, 6],
        "lengths": [20, 20, 40, 400, 3, 21],
        "num_images": [1, 1, 2, 3, 0, 0],
    }
    index = SimpleNamespace(**{name: np.array(each) for name, each in numbers.items()})
    dataset = SimpleNamespace(
        index=index, positions=lambda images: np.flatnonzero((index.num_images > 0) == images).tolist()
    )
    assert _different(dataset) == [0, 5, 2]  # 3 is long, 4 has nothing to learn


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no.py can't be read: No such file or directory"):
        parse("--plugin", str(tmp_path / "no.py"))
    with pytest.raises(ConfigError, match="name the file in small letters"):
        parse("--plugin", write(tmp_path, WHOLE, "my-idea"))
    with pytest.raises(ConfigError, match="an extension has this name: rename the file"):
        parse("--plugin", write(tmp_path, WHOLE, "lora"))
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"two files are named idea.py"):
        parse("--plugin", write(tmp_path, WHOLE), write(tmp_path / "b", WHOLE + "#"))
    with pytest.raises(ConfigError, match="--plugin needs the path of a Python file"):
        parse("--plugin")


def test_it_counts_as_untried_with_an_axis_unless_it_says_so(tmp_path):
    file = write(tmp_path, WHOLE)
    for flag in [name for name in ("tensor_parallel", "sequence_parallel") if name in EXTENSIONS]:
        with pytest.raises(ConfigError, match=f"idea.py needs .*define no needs.*--{flag}_size 2"):
            parse("--plugin", file, f"--{flag}_size", "2")
    load([write(tmp_path, WHOLE.replace("    idea_size", "    needs: ClassVar = {}\n    idea_size"))])
    assert flags_class("idea").needs == {}


def test_a_wrap_that_changes_the_model_is_called(tmp_path):
    for method, is_of_model in (
        ("trains(self, model, args)", True),
        ("kernels(self, model, plan, resolved, ranks)", False),
    ):
        wrap = f"class Own(Wrap):\n    def {method}: return []\nextension = Extension(wrap=Own())"
        load([write(tmp_path, FLAGS + wrap)])
        assert flags_class("idea").of_model == is_of_model


def test_a_rate_below_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"idea.py: Flags.module_rate is -1.0: give a number from 0"):
        parse("--plugin", write(tmp_path, WHOLE + "Flags.module_rate = -1.0"))


def test_a_module_and_an_adapter_are_refused(tmp_path):
    if "lora" not in EXTENSIONS:
        pytest.skip("there is no extension lora")
    file = write(tmp_path, FLAGS + "extension = Extension(module=print)")
    with pytest.raises(ConfigError, match=r"has a module, but the export of an adapter .* can't hold"):
        parse("--plugin", file, "--lora_enable", "True")


def test_a_modules_file_in_the_base_folder_is_hashed_for_a_resume(tmp_path):
    base = toys.write_base(tmp_path / "base")
    save_file({"weight": torch.zeros(1)}, Path(base["model_name_or_path"]) / "own_idea.safetensors")
    assert "own_idea.safetensors" not in weight_hashes(arguments(base), tmp_path, None)["model_name_or_path"]
    load([write(tmp_path, FLAGS + "extension = Extension(module=print)")])
    found = weight_hashes(arguments(base), tmp_path, None)["model_name_or_path"]
    assert [*found] == ["model.safetensors", "own_idea.safetensors"]


def test_a_model_that_names_a_plugin_is_opened_with_it_only(tmp_path, capsys):
    file = write(tmp_path, WHOLE)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llava", "llava_ds_plugin": {"idea": "0" * 64}}))
    with pytest.raises(ConfigError, match=r"--model_path x was trained with a plugin, idea.py \(sha256 0{12}\): give"):
        read_config(config, "--model_path x")
    load([file])
    for _ in range(2):
        read_config(config, "--model_path x")
    assert capsys.readouterr().err.count("--model_path x was trained with another idea.py (sha256 000000000000") == 1
    refuse_missing({"llava_ds_plugin": plugins()}, "here")
    assert not capsys.readouterr().err
    for wrong in ({"llava_ds_plugin": ["idea"]}, {"llava_ds_plugin": {}, "llava_ds_answers_without": "idea"}):
        with pytest.raises(ConfigError, match=r"llava_ds_plugin in config.json is not names"):
            refuse_missing(wrong, "here")


def test_a_model_is_opened_without_a_plugin_that_its_answers_do_not_need(tmp_path):
    load([write(tmp_path, WHOLE), write(tmp_path, DIFFERS, "other"), write(tmp_path, PROJECTOR, "mine")])
    entries = plugin_entries("mine:4")
    assert entries == {"llava_ds_plugin": plugins(), "llava_ds_answers_without": ["idea"]}
    assert plugin_entries("mlp2x_gelu")["llava_ds_answers_without"] == ["idea", "mine"]
    load([])
    assert plugin_entries("mlp2x_gelu") == {}
    with pytest.raises(ConfigError, match=r"was trained with a plugin, other.py .* and mine.py"):
        refuse_missing(entries, "here")
    refuse_missing({**entries, "llava_ds_answers_without": ["idea", "other", "mine"]}, "here")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_short_and_names_its_paper(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 150 and "(arXiv 2" in text.split('"""')[1]
    load([str(file)])
    assert [*plugins()] == [file.stem]


def test_without_the_flag_no_line_of_it_is_loaded():
    code = "import sys; import llava_ds.config.parsing as p; p.parse_arguments(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *NEEDED], capture_output=True, text=True, check=True)
    assert "llava_ds.config.parsing" in done.stdout
    assert not [name for name in done.stdout.split() if "plugins" in name or "examples" in name]


@pytest.mark.parametrize("script", ["train", "rl", "evaluate", "chat", "export", "inspect_data", "estimate"])
def test_every_script_takes_it(tmp_path, script):
    path = ROOT / "run" / f"{script}.py"
    if not path.exists():
        pytest.skip("deleted with its extension")
    words = ["SOURCE"] if script == "export" else []
    done = subprocess.run(
        [sys.executable, str(path), *words, "--plugin", write(tmp_path, "1 / 0")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "idea.py:1 in <module>: ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


FIELDS = FLAGS + "class Own(RecordFields):\n    names = ('side',)\nextension = Extension(fields=Own())\n"


def test_fields_of_records_are_stored_and_reach_the_batch(tmp_path, tokenizer):
    data = toys.write_data(tmp_path / "data", "iti")
    records = json.loads(Path(data["data_path"]).read_text())
    records[0]["side"], records[2]["side"] = [[1.0, 2.5]], "no numbers"
    Path(data["data_path"]).write_text(json.dumps(records))

    def opened():
        return toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache", max_bad_fraction=0.5)

    plain = opened()
    assert len(plain) == 3 and plain.index.facts["unread"] == {"side": 2}
    load([write(tmp_path, FIELDS)])
    for _ in range(2):  # encoded, and from the cache
        dataset = opened()
        assert len(dataset) == 2 and "'side' is not numbers" in next(dataset.rejections())["reason"]
        assert dataset.index.facts["unread"] == {}
        batch = collate([dataset[1], dataset[0]], dataset.image_options).to("cpu")
        none, side = batch.extra["idea.side"]
        assert none is None and side.tolist() == [[1.0, 2.5]]
    load([])
    assert len(opened()) == 3 and not collate([opened()[0]], plain.image_options).extra


CONVERTING = """
class Own(RecordFields):
    columns = ("asked",)
    def convert(self, record):
        if record["asked"] == "bad":
            raise DataError("is bad")
        turns = [{"from": "human", "value": record["asked"]}, {"from": "gpt", "value": record["said"]["text"] + "END"}]
        return {"id": record["number"], "conversations": turns}
extension = Extension(fields=Own())
"""


def test_a_format_of_records_is_converted(tmp_path, tokenizer):
    records = [{"number": str(i), "asked": f"What is {i} ?", "said": {"text": f"It is {i} ."}} for i in range(3)]
    records += [{**records[0], "asked": "bad"}, {**records[0], "said": None}]
    file = tmp_path / "data.json"
    file.write_text(json.dumps(records))

    def opened():
        where = {"data_path": str(file), "image_folder": str(tmp_path), "cache_dir": tmp_path / "cache"}
        return toys.encoded(**where, tokenizer=tokenizer, max_bad_fraction=0.5)

    fingerprints = set()
    for end in (".", "!"):  # another converter, other samples
        load([write(tmp_path, FLAGS + "from llava_ds.constants import DataError\n" + CONVERTING.replace("END", end))])
        for _ in range(2):  # encoded, and from the cache
            dataset = opened()
            assert len(dataset) == 3 and dataset.index.facts["unread"] == {}
        fingerprints.add(dataset.fingerprint)
        bad, wrong = (each["reason"] for each in dataset.rejections())
        assert "is bad" in bad and "idea.py:21 in Own.convert: TypeError" in wrong
    assert len(fingerprints) == 2
    load([])
    with pytest.raises(ConfigError, match="its records are of no known format"):
        opened()


def test_fields_are_for_answers_from_records(tmp_path):
    if "preference" not in EXTENSIONS:
        pytest.skip("there is no extension preference")
    with pytest.raises(
        ConfigError, match=r"idea.py reads fields of records, but --objective dpo does not pass them on"
    ):
        parse("--plugin", write(tmp_path, FIELDS), "--objective", "dpo")
