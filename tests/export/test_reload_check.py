# T tokens, V vocabulary
"""The comparison at a run's end: what it finds, where and how long it computes, and what it says."""

import copy
import functools
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from exporting import RANKS, export_plan
from safetensors.torch import load_file, save_file

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.engine.activation_checkpointing import repeated_layers
from llava_ds.engine.construct import build_model
from llava_ds.engine.runner import Direct
from llava_ds.export import final_export, layer_by_layer
from llava_ds.export.layer_by_layer import Deadline
from llava_ds.export.output_folder import write_live_folder
from llava_ds.export.reload_check import compare_reloaded, compared_positions
from llava_ds.geometry import media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.open.hf import HF_CLASSES, TOLERANCE
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.tf32 import allow_tf32
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH

TEXT = 70  # tokens behind the image


@pytest.fixture(scope="module")
def tiny():
    """(model, its plan, arguments, a sample with an image)."""
    model_args = ModelArguments(model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH))
    args = Arguments(model_args, DataArguments(), TrainingArguments(), frozenset())
    plan = plan_model(model_args, 512)
    options = plan.tower.image_options(args)
    model = build_model(plan, model_args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    size = plan.images.size
    layout = media_layout("image", ((size, size),), 1, options)
    pixels = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([1, *[-200] * layout.num_tokens, *range(10, 10 + TEXT)])
    return model, plan, args, LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), [(pixels, layout)])


class Run:
    """A run's end: the model, and what is printed when it is exported."""

    def __init__(self, tiny, folder, monkeypatch, capsys) -> None:
        self.model, self.plan, self.args, sample = tiny
        self.options = self.plan.tower.image_options(self.args)
        self.export = export_plan(self.model, self.plan, self.args.model, self.options)
        self.dataset = SimpleNamespace(example=lambda: sample, image_options=self.options)
        self.engine = SimpleNamespace(
            module=self.model,
            eval=self.model.eval,
            empty_partition_cache=lambda: None,
        )
        self.batch, self.layouts = collate([sample], self.options), [layout for _, layout in sample.media]
        self.folder, self.capsys = folder, capsys
        for name in ("write_card", "read_run_record", "write_trainer_state"):
            monkeypatch.setattr(final_export, name, lambda *_: (None, None))

    def end(self, **flags: object) -> str:
        args = self.args.replaced(output_dir=str(self.folder), **flags)
        final_export.export_model(Direct(self.engine), self.export, args, self.dataset, RANKS)
        return self.capsys.readouterr().out

    def compare(self, check: str = "full") -> float:
        """Of the folder as it is now."""
        with torch.no_grad():
            logits = self.model(self.batch, Logits(compared_positions(check, len(self), torch.device("cpu"))))
        tower = self.model.vision_tower
        return compare_reloaded(self.folder, self.batch, self.layouts, tower.mean, tower.std, logits)

    def __len__(self) -> int:
        return self.batch.input_ids.shape[1]


@pytest.fixture
def run(tiny, tmp_path, monkeypatch, capsys) -> Run:
    return Run(tiny, tmp_path, monkeypatch, capsys)


def with_ten_bits(x: torch.Tensor) -> torch.Tensor:
    """TF32: float32 rounded to 10 bits of mantissa, to the nearest."""
    return ((x.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def as_on_ampere(model: torch.nn.Module, monkeypatch) -> None:
    """Let the tower's patch convolution round as cuDNN does where torch's switch allows it."""
    [conv] = [module for module in model.vision_tower.modules() if isinstance(module, torch.nn.Conv2d)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = conv.weight
        if torch.backends.cudnn.conv.fp32_precision == "tf32":
            x, weight = with_ten_bits(x), with_ten_bits(weight.detach())
        return F.conv2d(x, weight, conv.bias, conv.stride)

    monkeypatch.setattr(conv, "forward", forward)


def test_tf32_in_one_convolution_is_more_than_the_comparison_allows(run, monkeypatch):
    """With torch's own switches the tiny recipes would end in an error on an Ampere GPU."""
    as_on_ampere(run.model, monkeypatch)
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # torch's default
    try:
        write_live_folder(run.export, run.model, run.folder, RANKS)
        with pytest.raises(RuntimeError, match="transformers computes different logits from it"):
            run.compare()
        for tf32 in (True, False):
            allow_tf32(tf32)
            assert "logits differ by" in run.end(tf32=tf32)
            assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == tf32
    finally:
        allow_tf32(False)


def test_the_default_compares_every_position(run):
    assert run.end().endswith("(reloaded with transformers, logits differ by 0.0e+00 of the largest)\n")


def test_a_sample_is_the_first_positions_and_off_is_said(run, monkeypatch):
    asked = []
    own = type(run.model).forward
    monkeypatch.setattr(
        type(run.model), "forward", lambda self, batch, head: asked.append(head.at.tolist()) or own(self, batch, head)
    )
    said = run.end(check_export="sample")
    assert f"(reloaded with transformers, logits at the first 64 of {len(run)} positions differ by " in said
    assert asked == [list(range(64))]
    assert run.end(check_export="off").endswith("(not reloaded: --check_export off)\n")
    assert len(asked) == 1


def change(folder, change_tensors) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change_tensors(tensors)
    save_file(tensors, path, {"format": "pt"})


def exchange(one: str, other: str, tensors: dict) -> None:
    one, other = (next(name for name in tensors if name.endswith(end)) for end in (one, other))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def drop(end: str, tensors: dict) -> None:
    del tensors[next(name for name in tensors if name.endswith(end))]


def roll(end: str, tensors: dict) -> None:
    name = next(name for name in tensors if name.endswith(end))
    tensors[name] = tensors[name].roll(1, 0).contiguous()


DAMAGE = {
    "two layers exchanged": functools.partial(exchange, "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
    "gate for up": functools.partial(exchange, "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"),
    "one missing": functools.partial(drop, "layers.1.self_attn.q_proj.weight"),
    "rows of the output layer": functools.partial(roll, "lm_head.weight"),
    "the tower's positions": functools.partial(roll, "position_embedding.weight"),
    "the projector": functools.partial(roll, "linear_2.bias"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_both_checks_find_permuted_and_missing_weights(run, damage):
    write_live_folder(run.export, run.model, run.folder, RANKS)
    assert run.compare("sample") <= TOLERANCE[torch.float32]
    change(run.folder, DAMAGE[damage])
    for check in ("full", "sample"):
        with pytest.raises(RuntimeError, match="transformers computes different logits from it"):
            run.compare(check)


def test_at_the_deadline_the_run_says_what_was_not_compared(run, monkeypatch):
    monkeypatch.setattr(layer_by_layer, "LIMIT_S", 0.0)
    said = run.end()
    assert "(its names and shapes were checked, but not its logits: after 0 s only 0 of " in said
    assert f"--check_export sample computes 64 positions, not {len(run)})" in said
    assert "--check_export sample" not in run.end(check_export="sample")


def test_large_models_get_all_threads_and_leave_them_again(run, monkeypatch):
    seen = []
    own = Deadline.check
    monkeypatch.setattr(Deadline, "check", lambda *args: seen.append(torch.get_num_threads()) or own(*args))
    monkeypatch.setattr(layer_by_layer.os, "sched_getaffinity", lambda _: range(3))
    before = torch.get_num_threads()
    run.end()
    assert set(seen) == {before}  # a small one is computed as in training, to the bit
    monkeypatch.setattr(layer_by_layer, "SMALL_BYTES", 0)
    seen.clear()
    run.end()
    assert set(seen) == {3} and torch.get_num_threads() == before
    monkeypatch.setattr(layer_by_layer, "LIMIT_S", 0.0)
    run.end()
    assert torch.get_num_threads() == before


def test_compiled_layers_are_not_compiled_for_a_single_forward(run):
    run.model = run.engine.module = copy.deepcopy(run.model)
    graphs = []
    for layer in repeated_layers(run.model):
        layer.forward = torch.compile(layer.forward, backend=lambda graph, _: graphs.append(graph) or graph)
    assert "logits differ by 0.0e+00" in run.end()
    assert not graphs


def test_a_gpu_is_used_where_its_free_memory_has_room(monkeypatch):
    cuda = torch.device("cuda:1")
    logits = SimpleNamespace(device=cuda, numel=lambda: 2000 * 128_256)
    asked, free = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (free[-1], 80 * 10**9))
    for num_bytes, device in ((12 * 10**9, cuda), (9 * 10**9, torch.device("cpu"))):
        free.append(num_bytes)  # 5 GB are for weights, 4.1 for logits, and 1
        assert layer_by_layer._device(logits, 5 * 10**9) == device
    assert asked == ["emptied", cuda] * 2
    assert layer_by_layer._device(torch.zeros(2, 3), 1) == torch.device("cpu")


def test_one_layer_of_a_model_is_on_the_device_at_a_time(run, monkeypatch):
    """The device is a stand-in that counts what is copied to it and not let go."""
    held = {"now": 0, "most": 0}

    def moved(data: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = data.clone()
        held["now"] += copy.nbytes
        held["most"] = max(held.values())
        weakref.finalize(copy.untyped_storage(), lambda size: held.update(now=held["now"] - size), copy.nbytes)
        return copy

    write_live_folder(run.export, run.model, run.folder, RANKS)
    monkeypatch.setattr(layer_by_layer, "_moved", moved)
    assert run.compare() == 0
    model = HF_CLASSES["llava"].from_pretrained(run.folder)
    layers = [m for m in model.modules() if isinstance(m, layer_by_layer.GradientCheckpointingLayer)]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    ends = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    buffers = sum(b.nbytes for b in model.buffers())
    assert len(layers) > 3 and held["most"] <= ends + max(sizes) + buffers


def test_weights_stay_in_the_files_until_they_are_used(run):
    """Or a second copy of a large model would have to fit into memory beside training."""
    write_live_folder(run.export, run.model, run.folder, RANKS)
    model = HF_CLASSES["llava"].from_pretrained(run.folder, dtype=torch.float32, local_files_only=True)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    for name, parameter in model.named_parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in spans), name
