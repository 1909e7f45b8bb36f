"""Whatever runs a model, its answers are transformers' own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT, ds_config, launch, run_many, toy_run

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.native_ops import extensions_folder
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer import engines
from llava_ds.extensions.infer.engines import (
    NO_KERNELS,
    TENSOR_PARALLEL,
    EngineOptions,
    load_for_inference,
    zero_config,
)
from llava_ds.extensions.infer.formats import open_model
from llava_ds.extensions.infer.generate import Prompt, Sampling, answer, greedy_answers, stream
from llava_ds.extensions.infer.load import fill_model, load_model
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.hf import TOLERANCE
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH

WORKER = Path(__file__).parent / "engines_worker.py"


def exported(folder: Path, base: dict[str, str], dtype: torch.dtype = torch.float32, anyres: bool = False) -> Path:
    """An exported folder of the parts that flags name, with a random projector between them."""
    merge_type = "spatial_unpad" if anyres else "flat"
    args = ModelArguments(**base, mm_patch_merge_type=merge_type)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, dtype, 0, RANKS)
    spec = plan.images
    ratio = "anyres" if anyres else "square"
    image_options = ImageOptions(spec.size, spec.patch_size, spec.mean, ratio, merge_type=merge_type)
    export(model, plan, args, image_options, folder)
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    return exported(folder / "out", toys.write_base(folder / "base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return toys.write_data(tmp_path_factory.mktemp("questions"), "iit" * 20)


def prompts(data: dict[str, str]) -> list[Prompt]:
    return [
        question.prompt
        for question in read_questions("llava", Given(data["data_path"], image_folder=data["image_folder"]), None)
    ]


@pytest.mark.parametrize("kind", ["square", "tied", "anyres"])
def test_weights_that_stream_in_are_those_that_transformers_reads(kind, tmp_path):
    base = toys.write_base(tmp_path / "base", tie_word_embeddings=kind == "tied")
    folder = exported(tmp_path / "out", base, anyres=kind == "anyres")
    with open_model(folder) as found:
        streamed = fill_model(found, torch.float32)
    read = load_model(folder).model
    ours, theirs = streamed.state_dict(), read.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    tables = dict(streamed.named_buffers())
    assert all(torch.equal(tables[name], table) for name, table in read.named_buffers())
    assert streamed.generation_config.to_dict() == read.generation_config.to_dict()
    assert (streamed.lm_head.weight is streamed.get_input_embeddings().weight) == (kind == "tied")


def test_one_rank_of_deepspeed_computes_the_same_bits(tmp_path, data, capsys):
    folder = exported(tmp_path / "out", toys.write_base(tmp_path / "base"), torch.bfloat16)
    plain = load_model(folder, "cpu")
    loaded = load_for_inference(folder, EngineOptions("deepspeed"), RANKS)
    assert NO_KERNELS in loaded.notes
    tables = dict(loaded.model.named_buffers())
    assert all(torch.equal(tables[name], table) for name, table in plain.model.named_buffers())
    asked = prompts(data)[:12]
    assert greedy_answers(loaded, asked, max_new_tokens=6) == greedy_answers(plain, asked, max_new_tokens=6)
    embeds = torch.randn(1, 9, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded.model(inputs_embeds=embeds).logits, plain.model(inputs_embeds=embeds).logits)
    capsys.readouterr()
    stream(loaded, asked[0], Sampling(max_new_tokens=2))
    assert capsys.readouterr().out == ""


def test_what_can_not_be_cut_or_run_is_refused(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "on_every_rank", lambda ranks, ask: ask())  # the other ranks would say the same
    three = Ranks(0, 0, 3, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match="over 3 ranks: num_attention_heads 4, num_key_value_heads 2 can't be divided"
    ):
        load_for_inference(toy, EngineOptions("deepspeed"), three)
    two = Ranks(0, 0, 2, torch.device("cpu"))
    phi3 = exported(tmp_path / "phi3", toys.write_base(tmp_path / "base", family="phi3"))
    with pytest.raises(
        ConfigError, match=r"is a phi3, and DeepSpeed shards llama, mistral,.*: start one rank, or give"
    ):
        load_for_inference(phi3, EngineOptions("deepspeed"), two)
    for offload in ("none", "cpu"):
        options = EngineOptions("deepspeed", offload, dtype="float16")
        with pytest.raises(ConfigError, match="float16, but DeepSpeed does not run that on a CPU: give --dtype"):
            load_for_inference(toy, options, RANKS)


def test_the_configuration_of_zero_inference():
    options = EngineOptions("deepspeed", "nvme", "/disk")
    config = zero_config(torch.bfloat16, options, Ranks(0, 0, 2, torch.device("cuda")))
    zero = config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == "/disk" and zero["offload_param"]["pin_memory"]
    assert config["bf16"]["enabled"] and config["train_batch_size"] == 2
    assert "bf16" not in zero_config(torch.float32, EngineOptions("deepspeed", "cpu"), RANKS)


@pytest.fixture(scope="module")
def cases(tmp_path_factory, data) -> list[dict]:
    """What engines_worker.py asks: the tiny model 100 questions, toys of other kinds a few."""
    folder = tmp_path_factory.mktemp("cases")
    tiny = exported(folder / "tiny", {"model_name_or_path": str(LLAMA_PATH), "vision_tower": str(CLIP_PATH)})
    anyres = exported(folder / "anyres", toys.write_base(folder / "anyres-base"), anyres=True)

    def case(name: str, model: Path, questions: int, **options: object) -> dict:
        asked = {"questions": questions, "max_new_tokens": 16}
        return {"name": name, "folder": str(model), "options": options, **asked, **data}

    found = [
        case("tiny", tiny, 100),
        case("tiny in bfloat16", tiny, 20, dtype="bfloat16"),
        case("tiny from CPU memory", tiny, 100, offload="cpu"),
        case("tiny in bfloat16 from CPU memory", tiny, 20, dtype="bfloat16", offload="cpu"),
        case("anyres", anyres, 20),
        case("anyres from CPU memory", anyres, 20, offload="cpu"),
    ]
    if (extensions_folder() / "async_io" / "async_io.so").is_file():  # compiling it takes minutes
        disk = folder / "disk"
        disk.mkdir()
        found.append(case("tiny from NVMe", tiny, 100, offload="nvme", offload_path=str(disk)))
    for family in set(TENSOR_PARALLEL) - {"llama"}:
        model = exported(folder / family, toys.write_base(folder / f"{family}-base", family=family))
        found.append(case(family, model, 20))
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_answers_are_the_same(num_ranks, cases, data, tmp_path):
    assert len(prompts(data)) >= 100
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = launch(num_ranks, WORKER, str(tmp_path / "cases.json"), timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {
        line["name"]: line for text in done.stdout.splitlines() if text.startswith("{") and (line := json.loads(text))
    }
    assert list(lines) == [case["name"] for case in cases]
    for name, line in lines.items():
        if num_ranks == 1:
            assert line.get("difference") == 0 and line["deepspeed"] == line["hf"], (name, line)
        elif "bfloat16" in name:  # so where answers differ, two tokens were within twice as much
            assert line.get("difference", 1) < TOLERANCE[torch.bfloat16], (name, line)
        else:
            assert line.get("difference", 1) < TOLERANCE[torch.float32], (name, line)
            assert line["deepspeed"] == line["hf"], (name, line)
    if num_ranks == 2:
        whole, cut = lines["tiny from CPU memory"], lines["tiny"]
        assert cut["tower"] == whole["tower"] and cut["decoder"] < 0.51 * whole["decoder"]


@pytest.mark.long
def test_the_script_on_two_ranks_says_what_one_process_says(toy, data):
    picture = str(next(Path(data["image_folder"]).glob("*.png")))
    chat, flags = ROOT / "run" / "chat.py", ["--model_path", str(toy), "--max_new_tokens", "6", "--engine", "deepspeed"]
    asked = Prompt(
        read_questions("llava", Given(data["data_path"], image_folder=data["image_folder"]), None)[0].prompt.messages[
            :1
        ],
        (picture,),
    )
    text = asked.messages[0].text.removeprefix("<image>\n")
    done = launch(2, chat, *flags, "--image", picture, "--question", text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == answer(load_model(toy), [asked], max_new_tokens=6)[0]
    assert "sharded over 2 ranks" in done.stderr and "tokens/s" in done.stderr
    done = launch(2, chat, *flags, "--image", "nowhere.png", "--question", text)
    assert done.returncode == 2 and "nowhere.png" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_checkpoint_answers_as_its_export(data, tmp_path):
    given = {**toys.write_base(tmp_path / "base"), **data}
    saved = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    run_many(2, tmp_path, [toy_run(given, tmp_path / "out", ds_config(3), **saved)], timeout_s=900)
    asked = prompts(data)[:10]
    checkpoint, expected = tmp_path / "out" / "checkpoint-2", answer(load_model(tmp_path / "out"), asked)
    loaded = load_model(checkpoint)
    assert answer(loaded, asked) == expected
    assert loaded.notes == () and loaded.version == "v1"
    moved = {name: shutil.move(given[name], tmp_path / name) for name in ("model_name_or_path", "vision_tower")}
    with pytest.raises(ConfigError, match="not found: give its new path"):
        load_model(checkpoint)
    assert answer(load_model(checkpoint, moved=moved), asked) == expected


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_ranks_of_a_machine_share_the_files_pages_until_they_have_cut_their_part(tmp_path):
    """Each rank read the whole model into memory of its own, before it was sharded or moved to a GPU."""
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    folder = exported(tmp_path / "out", toys.write_base(tmp_path / "base", **size, num_key_value_heads=8))
    with open_model(folder) as found:
        fill_model(found, torch.float32)  # what libraries allocate once
        before = _anonymous_bytes()
        mapped = fill_model(found, torch.float32, maps=True)
        grown = _anonymous_bytes() - before
        copied = fill_model(found, torch.float32)
    num_bytes = sum(parameter.nbytes for parameter in mapped.parameters())
    assert num_bytes > 50e6 and grown < num_bytes / 5
    assert all(torch.equal(a, b) for a, b in zip(mapped.parameters(), copied.parameters(), strict=True))


def test_no_weight_stays_mapped_from_a_file_that_may_be_replaced(toy):
    loaded = load_for_inference(toy, EngineOptions("deepspeed"), RANKS)
    assert str(toy) not in Path("/proc/self/maps").read_text() and loaded.model.training is False
