"""The examples of --plugin train: on one rank and two, packed as unpacked, resumed as whole, and exported."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import toys
from drawing_runs import RULES
from known_flags import known
from launching import command_line, ds_config, environment, launch, losses, run_many, toy_run
from safetensors.torch import load_file
from textbook_pairs import write_pairs

from llava_ds.runtime.launchers import free_port

ROOT = Path(__file__).parents[3]
PLUGINS = ROOT / "examples" / "plugins"
STEPS, SAVED = 4, 2
MARK = "#"  # a token of the toys' vocabulary
FLAGS = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "report_to": "none",
    "weight_decay": 0.0,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "constant",
}
PLACES = {"once": (1, 0), "unpacked": (1, 0), "packed": (1, 0), "zero1": (2, 1), "zero2": (2, 2), "zero3": (2, 3)}


def flags_of(name: str, given: dict[str, str]) -> dict[str, object]:
    """The flags of an example."""
    own = {
        "token_packer": {"mm_projector_type": "token_packer:3", "mm_spatial_pool_stride": 1},
        "prumerge": {"mm_projector_type": "prumerge:3", "mm_spatial_pool_stride": 1},
        "ross": {"ross_weight": 0.5, "ross_learning_rate": 1e-3},
        "pave": {"pave_width": 4},
        "mini_gemini": {"mm_projector_type": "mini_gemini:16", "vision_tower": "{0},{0}".format(given["vision_tower"])},
        "osprey": {"osprey_mark": MARK},
        "vip_llava": {},
        "voco_llama": {"voco_mark": MARK},
        "avg_llava": {"avg_granularities": 3, "avg_learning_rate": 1e-3},
        "viral": {"viral_encoder": given["vision_tower"], "viral_weight": 0.5},
    }[name]
    return {"plugin": PLUGINS / f"{name}.py", **own}


MODULES = {"avg_llava", "osprey", "pave", "ross", "viral", "voco_llama"}  # examples with a module
NUMBERS = {"ross": "ross", "viral": "viral", "avg_llava": "router"}
# One of each kind is tried in make test.
EXAMPLES = [
    name if name in ("token_packer", "ross", "pave") else pytest.param(name, marks=pytest.mark.long)
    for name in (
        *("token_packer", "ross", "pave", "prumerge", "viral", "mini_gemini", "osprey", "vip_llava"),
        *("voco_llama", "avg_llava"),
    )
]


def test_every_example_is_here():
    names = [getattr(each, "values", (each,))[0] for each in EXAMPLES]
    assert sorted(names) == sorted(file.stem for file in PLUGINS.glob("*.py"))


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("given")
    data = toys.write_data(folder / "data", "iitiitii")
    records = json.loads(Path(data["data_path"]).read_text())
    for i, record in enumerate(records[::2]):  # the others have no side features
        record["side"] = [[0.1 * i, 1.0, row - 1.0, 0.5] for row in range(i + 1)]
        if "image" in record:
            record["conversations"][0]["value"] += f" What is {MARK} ?"
            record["regions"] = record["prompts"] = [[0.1, 0.2, 0.6, 0.9 - 0.1 * i]]
    Path(data["data_path"]).write_text(json.dumps(records))
    return {**toys.write_base(folder / "base"), **data}


@pytest.fixture(scope="module", params=EXAMPLES)
def runs(request, given, tmp_path_factory) -> tuple[str, Path]:
    """The example's name, and the folder of its runs."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    own = {**FLAGS, **flags_of(name, given)}
    packed, unpacked = {"tokens_per_micro_batch": 2000}, {"per_device_train_batch_size": 1}
    layouts = {"unpacked": unpacked, "once": {**unpacked, "max_steps": 1}}

    def todo(run: str, stage: int) -> dict[str, object]:
        return toy_run(given, folder / run, ds_config(stage), **own | layouts.get(run, packed))

    for ranks in (1, 2):
        here = {run: stage for run, (number, stage) in PLACES.items() if number == ranks}
        run_many(ranks, folder / f"launch-{ranks}", [todo(run, stage) for run, stage in here.items()])
    # As if the run had been killed after its first checkpoint.
    shutil.copytree(folder / "zero3" / f"checkpoint-{SAVED}", folder / "resumed" / f"checkpoint-{SAVED}")
    run_many(2, folder / "launch-again", [todo("resumed", 3)])
    return name, folder


TABLE: dict[str, dict[str, str]] = {}  # of each example, what the tests below found


def note(name: str, **found: object) -> None:
    TABLE.setdefault(name, {}).update((title, str(value)) for title, value in found.items())


def weights(run: Path) -> dict:
    return {file.name: load_file(file) for file in run.glob("*.safetensors")}


def test_packed_is_unpacked_and_every_stage_is_the_same(runs):
    name, folder = runs
    for run in ("packed", "zero1", "zero2", "zero3"):
        pairs = zip(losses(folder / run), losses(folder / "unpacked"), strict=True)
        note(name, **{run: f"{max(abs(one / other - 1) for one, other in pairs):.0e}"})
        assert losses(folder / run) == pytest.approx(losses(folder / "unpacked"), rel=1e-5)
        for number in ("grad_norm", *([NUMBERS[name]] if name in NUMBERS else [])):
            assert logged(folder / run, number) == pytest.approx(logged(folder / "unpacked", number), rel=1e-4)
    assert all(map(math.isfinite, losses(folder / "unpacked")))


def logged(run: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]


def test_its_own_loss_falls(runs):
    name, folder = runs
    if name not in NUMBERS:
        pytest.skip("it changes no loss")
    first, *_, last = logged(folder / "unpacked", NUMBERS[name])
    assert last < first


def test_a_resumed_run_ends_in_the_same_model(runs):
    name, folder = runs
    whole, again = weights(folder / "zero3"), weights(folder / "resumed")
    assert whole.keys() == again.keys() and losses(folder / "resumed") == losses(folder / "zero3")[SAVED:]
    assert all(tensor.equal(again[file][key]) for file, each in whole.items() for key, tensor in each.items())
    note(name, resumed="bit-equal")


def test_every_weight_of_it_learns(runs):
    name, folder = runs
    if name == "vip_llava":
        pytest.skip("it has none")
    first, last = (own_weights(folder / run, name) for run in ("once", "unpacked"))
    assert first.keys() == last.keys() and first
    assert [key for key, tensor in first.items() if tensor.equal(last[key])] == []
    note(name, learned=f"{len(first)} of {len(first)}")


def own_weights(run: Path, name: str) -> dict:
    """The tensors of an example's module, or of its projector."""
    files = weights(run)
    if name in MODULES:
        return files[f"own_{name}.safetensors"]
    return {key: tensor for key, tensor in files["model.safetensors"].items() if "mm_projector.own." in key}


def test_the_export_names_it(runs):
    name, folder = runs
    config = json.loads((folder / "unpacked" / "config.json").read_text())
    assert config["llava_ds_plugin"].keys() == {name}
    assert f"| `--plugin {name}.py` | sha256 " in (folder / "unpacked" / "README.md").read_text()


def test_training_starts_from_its_export_without_it(runs, given, tmp_path):
    name, folder = runs
    if name != "ross":
        pytest.skip("tried for a further loss")
    given = {key: value for key, value in given.items() if key != "vision_tower"}
    given["model_name_or_path"] = folder / "unpacked"
    output = run_many(
        1, tmp_path / "launch", [toy_run(given, tmp_path / "after", ds_config(2), **FLAGS | {"max_steps": 1})]
    )
    assert "ross.py" not in output and "logits differ by" in output
    assert "plugin" not in (tmp_path / "after" / "config.json").read_text()
    assert [each.name for each in (tmp_path / "after").glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.long
def test_the_export_answers_with_it_and_only_with_it(runs, given, tmp_path):
    name, folder = runs
    data = ("--data_path", given["data_path"], "--image_folder", given["image_folder"], "--limit", "2")
    ask = ("--model_path", str(folder / "zero3"), "--task", "llava", *data, "--max_new_tokens", "2")
    if name in ("token_packer", "ross"):  # a projector, and a loss: the same for all
        alone = launch(1, ROOT / "run" / "evaluate.py", *ask)
        assert (f"was trained with a plugin, {name}.py" in alone.stderr) == (name == "token_packer")
        assert (alone.returncode == 0) == (name == "ross"), alone.stderr
    scored = tmp_path / "scored.json"
    answered = launch(
        1, ROOT / "run" / "evaluate.py", *ask, "--output", scored, "--plugin", str(PLUGINS / f"{name}.py")
    )
    assert answered.returncode == 0, answered.stderr
    assert json.loads(scored.read_text())
    lacks = re.search(r"answers without its plugin: (.*)", answered.stdout + answered.stderr)
    note(name, evaluated=lacks[1] if lacks else "with it")


@pytest.mark.long
def test_table(capsys):
    """Print what was found for every example."""
    titles = list(dict.fromkeys(title for each in TABLE.values() for title in each))
    with capsys.disabled():
        print("\n| example | lines |", *(f"{title} |" for title in titles))
        for name, each in TABLE.items():
            lines = len((PLUGINS / f"{name}.py").read_text().splitlines())
            print(f"| {name} | {lines} |", *(f"{each.get(title, '-')} |" for title in titles))


@pytest.mark.long
def test_the_commands_of_the_page_work(tmp_path):
    page = (ROOT / "docs" / "plugins.md").read_text()
    code, commands = (re.search(rf"^```{kind}\n(.*?)^```", page, re.S | re.M)[1] for kind in ("python", "bash"))
    assert len(code.splitlines()) < 20
    (tmp_path / "my_idea.py").write_text(code)
    for name in ("run", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    short = {"train.py": " --max_steps 2 --eval_strategy no", "evaluate.py": " --limit 2"}
    cache = f" --cache_dir {tmp_path / 'cache'}"
    for line in commands.splitlines():
        words = line + next(more for script, more in short.items() if script in line) + cache
        words = words.replace("deepspeed run", f"deepspeed --num_accelerators 1 --master_port {free_port()} run")
        done = subprocess.run(words.split(), cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "output" / "my_idea" / "config.json").read_text())
    assert config["mm_projector_type"] == "my_idea"


IDEA = '''
"""An idea with a mistake."""
import torch
from torch import nn
from llava_ds.extensions.base import Extension, SessionPart
from llava_ds.extensions.plugin_slots import ProjectorKind
from llava_ds.extensions.plugins.hidden_loss import HiddenLoss
from llava_ds.train.objectives.objective import Wrapped


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.used = nn.Linear(width, 1)
        {init}

    def forward(self, hidden):
        return self.used(hidden)[:, 0] {more}


class Part(SessionPart):
    def training_objective(self, plain):
        return HiddenLoss(plain, "idea", 1.0, lambda batch: batch.{at}, self._values)

    def _values(self, model, hidden, batch):
        return model.own_{name}(hidden){values}

    {part}


{extra}
extension = Extension({slots})
'''
MODULE = "part=Part, module=lambda text, tower, args: Head(text.hidden_size)"
SLOPPY = """
class Sloppy(ProjectorKind):
    def build(self, option, tower_width, width):
        layers = nn.Sequential(nn.Linear(tower_width, width), nn.BatchNorm1d(9, affine=False))
        return layers
"""
WHOLE_PACK = """
class Doubled(Wrapped):
    def forward(self, engine, batch):
        micro = self.objective.forward(engine, batch)
        return micro._replace(loss_sum=micro.loss_sum * len(batch.sources))
"""
TWICE = """
class Twice(Wrapped):
    def forward(self, engine, batch):
        micro = self.objective.forward(engine, batch)
        return micro._replace(loss_sum=micro.loss_sum + self.objective.forward(engine, batch).loss_sum)
"""
STEEP = """
class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * len(gradient)
"""
BEGIN = """def built(self, model):
        plain = model.begin
        model.begin = lambda batch: (plain(batch)[0]{change}, plain(batch)[1])
"""
# By name: parts of IDEA, and what is said.
MISTAKES = {
    "leaky": (
        {"slots": MODULE, "values": " * len(hidden)"},
        r"leaky.py: part \(the loss\): loss of 3 samples in one pack is .* over the same samples alone",
    ),
    "rolled": (  # the sums and gradients of the pack are right
        {"slots": MODULE, "values": ".roll(1)"},
        r"rolled.py: part \(the loss\): the loss of sample 1 of 3 in one pack has a gradient at the token embeddings "
        "of sample 3, which is not zero: a sample's part must not depend on the others",
    ),
    "averaged": (
        {"slots": MODULE, "values": ".mean().expand(len(hidden))", "at": "placing.positions"},
        r"averaged.py: part \(the loss\): .* in one pack ",
    ),
    "twice": (
        {"slots": "objective=lambda plan, mesh, plain: Twice(plain)", "extra": TWICE},
        r"twice.py: objective: runs the model twice with gradients for a micro-batch, but ZeRO-3 adds",
    ),
    "steep": (
        {"slots": MODULE, "values": " + Steep.apply(hidden.sum(1))", "extra": STEEP},
        r"steep.py: part \(the loss\): the gradient of .* of 3 samples in one pack is",
    ),
    "infinite": (
        {"slots": MODULE, "values": " / 0 * 0"},
        r"infinite.py: part \(the loss\): idea of 3 samples is not finite, nan: look for a division by zero",
    ),
    "noisy": (
        {"slots": MODULE, "values": " * torch.rand(len(hidden))"},
        r"noisy.py: part \(the loss\): .* of 3 samples is .* when computed again: draw no random numbers",
    ),
    "misspelled": (
        {"slots": MODULE, "values": " * batch.extra['misspelled.sdie']"},
        r"misspelled.py:\d+ in Part._values: KeyError: 'misspelled.sdie' is no key of Batch.extra, which has none$",
    ),
    "changing": (
        {"slots": MODULE, "values": " * batch.position_ids.add_(0).sub_(1).sum()"},
        r"changing.py: part: changes Batch.position_ids in place: clone\(\) it first",
    ),
    "doubled": (
        {"slots": "objective=lambda plan, mesh, plain: Doubled(plain)", "extra": WHOLE_PACK},
        r"doubled.py: objective \(the loss\): loss of 3 samples in one pack is",
    ),
    "unused": (
        {"slots": MODULE, "init": "self.unused = nn.Linear(2, 2)"},
        r"unused.py: module: the loss does not reach own_unused.unused.bias, own_unused.unused.weight: use these",
    ),
    "buffered": (
        {"slots": MODULE, "init": "self.register_buffer('mean', torch.zeros(1))"},
        r"buffered.py: module: the module can't be stored and loaded again: .*persistent=False",
    ),
    "counting": (
        {
            "slots": MODULE,
            "init": "self.register_buffer('calls', torch.zeros(1), persistent=False)",
            "more": "+ self.calls.add_(1) * 0",
        },
        r"counting.py: module: a forward pass changes the buffer own_counting.calls",
    ),
    "drawn": (
        {"slots": MODULE, "init": "import random; self.scale = random.random()", "more": "* self.scale"},
        r"drawn.py: module: the module, stored and loaded again, gives another output",
    ),
    "failing": (
        {"slots": MODULE, "init": "self.scale = torch.rand(1).item()"},
        r"failing.py:\d+ in Head.__init__: RuntimeError: Tensor.item\(\) cannot be called on meta tensors",
    ),
    "mixing": (
        {
            "slots": "part=Part2",
            "extra": f"class Part2(SessionPart):\n    {BEGIN}".format(change=" * len(batch.lengths)"),
        },
        r"mixing.py: part \(model.begin\): loss of 3 samples in one pack is",
    ),
    "short": (
        {"slots": "part=Part2", "extra": f"class Part2(SessionPart):\n    {BEGIN}".format(change="[:, :-1]")},
        r"short.py: part: a pass over a few samples fails in .*llava_ds.*, after .*short.py:\d+ in Part2.built.* "
        r"returned \(float32 \(1, \d+, 32\) on cpu, {.*}\): RuntimeError: .*: look at the shape, dtype and device",
    ),
    "quiet": (
        {"slots": "part=Part2", "extra": f"class Part2(SessionPart):\n    {BEGIN}".format(change=" * 2")},
        r"quiet.py: part: model.begin was replaced and gives other logits; .*say so in Flags.differs",
    ),
    "sloppy": (
        {"slots": "choices={'mm_projector_type': Sloppy()}", "extra": SLOPPY},
        r"sloppy.py: choices of mm_projector_type: the module can't be stored and loaded again",
    ),
}


@pytest.mark.long
def test_a_mistake_is_refused_before_the_first_step_with_its_slot(given, tmp_path):
    runs = {}
    for name, (parts, _) in MISTAKES.items():
        filled = {
            "init": "",
            "more": "",
            "values": "",
            "part": "",
            "extra": "",
            "at": "target_positions",
            "name": name,
            **parts,
        }
        (tmp_path / f"{name}.py").write_text(IDEA.format(**filled))
        more = {"mm_projector_type": name, "mm_spatial_pool_stride": 1} if name == "sloppy" else {}
        flags = toy_run(given, tmp_path / name, ds_config(3), **FLAGS, **more, plugin=tmp_path / f"{name}.py")
        runs[name] = command_line(flags)
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    said = tmp_path / "said.json"
    done = launch(1, ROOT / "tests" / "workers" / "refused_runs.py", tmp_path / "runs.json", said)
    assert said.exists(), done.stdout + done.stderr
    found = json.loads(said.read_text())
    wrong = {
        name: found.get(name) for name, (_, message) in MISTAKES.items() if not re.search(message, str(found.get(name)))
    }
    assert not wrong
    assert not [*tmp_path.glob("*/run/metrics.jsonl")]


HARMLESS = '''
"""A number of the log."""
from llava_ds.extensions.base import Extension
from llava_ds.train.objectives.objective import Wrapped


class Twice(Wrapped):
    def forward(self, engine, batch):
        micro = self.objective.forward(engine, batch)
        return micro._replace(metrics={**micro.metrics, "twice": 2 * micro.loss_sum.detach().double()})


extension = Extension(objective=lambda plan, mesh, plain: Twice(plain))
'''


@pytest.mark.long
def test_the_check_goes_with_dropout_pairs_experts_and_drawn_answers(given, tmp_path):
    (tmp_path / "twice.py").write_text(HARMLESS)
    (tmp_path / "rules.py").write_text(RULES)
    cases = {
        "dropout": {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.5},
        "pairs": {"objective": "dpo", **write_pairs(tmp_path / "pairs", 8)},
        "experts": {**toys.write_base(tmp_path / "experts", family="qwen3_moe"), "router_aux_loss_coef": 0.1},
        "drawn": {"objective": "grpo", "reward_funcs": f"{tmp_path / 'rules.py'}:even", "max_completion_length": 4},
    }
    cases = {name: flags for name, flags in cases.items() if known(flags)}
    todo = [
        toy_run({**given, **more}, tmp_path / name, ds_config(2), plugin=tmp_path / "twice.py", max_steps=1)
        for name, more in cases.items()
    ]
    output = run_many(1, tmp_path / "launch", todo, finished=False)
    assert output.count("loss and twice of 3 samples in one pack as in a pack each") == len(
        {*cases} & {"dropout", "pairs"}
    )
    assert output.count("no sample depends on the others") == ("dropout" in cases)
    assert output.count("as the run's own loss mixes samples") == ("experts" in cases)
    assert output.count("plugins are not checked before training") == ("drawn" in cases)
    if "pairs" in cases:
        assert "prompts are computed once per answer: a plugin may count" in output
