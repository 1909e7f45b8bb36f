"""LoRA on any part, in every variant: as peft's own model trains in a plain loop, opened by peft, merged, resumed."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toys
from launching import command_line, ds_config, losses, run_many, run_script, tight_config, toy_run
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPVisionModel

from llava_ds.config.parsing import parse_arguments
from llava_ds.data.collate import collate
from llava_ds.engine.construct import build_model
from llava_ds.model.llava import merge_features
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

peft = pytest.importorskip("peft")

STEPS, BATCH, RATE, WIDTH = 5, 4, 2e-3, 32
KINDS = "itiititt"
STAGES = (0, 2, 3)
NUM_EXPERTS = toys.FAMILIES["qwen3_moe"]["num_experts"]
PARTS = {
    "language": "language", "vision": "vision", "projector": "projector", "all": "language,vision,projector",
    "experts": "language",
}  # fmt: skip
EXPERTS = {"lora_target_modules": "q_proj,gate_up_proj,down_proj"}  # in a mixture, beside a linear layer
OF_EXPERTS = ("plain", "rslora", "gaussian", "chosen")  # what peft has beside their stacked matrices
VARIANTS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "chosen": {},
    "together": {
        "use_dora": True, "use_rslora": True, "init_lora_weights": "pissa", "lora_rank_pattern": '{"q_proj": 2}',
    },
}  # fmt: skip
# Layers, ranks and alphas of some, and what trains in full beside them, by part.
CHOSEN = {
    "language": {"lora_target_modules": "q_proj,down_proj", "modules_to_save": "norm,layers.1.mlp"},
    "vision": {"lora_target_modules": "q_proj,fc1", "modules_to_save": "encoder.layers.0.layer_norm1"},
    "projector": {
        "lora_target_modules": "mm_projector.2", "modules_to_save": "mm_projector.0",
        "lora_rank_pattern": '{"mm_projector.2": 2}', "lora_alpha_pattern": '{"mm_projector\\\\.[2-9]": 24}',
    },
    "all": {
        "lora_target_modules": r".*\.(q_proj|down_proj|fc1)|model\.mm_projector\.2", "modules_to_save": "norm,lm_head",
    },
    "experts": {
        "lora_target_modules": "down_proj", "modules_to_save": "norm", "lora_rank_pattern": '{"down_proj": 2}',
        "lora_alpha_pattern": '{"layers.0.*down_proj": 24}',
    },
}  # fmt: skip
PATTERNS = {"lora_rank_pattern": '{"q_proj": 2}', "lora_alpha_pattern": '{"layers.0.*q_proj": 24}'}


def cases(part: str) -> list[str]:
    if part == "experts":
        return list(OF_EXPERTS)
    return [name for name in VARIANTS if name != "together" or part == "all"]


class Runs:
    """A base, data and stage 1's projector, and the runs of one part on them, all in one launch of two ranks."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        family = "qwen3_moe" if part == "experts" else "llama"
        self.base = toys.write_base(folder / "base", family=family, hidden_size=WIDTH, intermediate_size=48)
        self.data = toys.write_data(folder / "data", KINDS)
        torch.manual_seed(5)
        shapes = {"0.weight": (WIDTH, 16), "0.bias": (WIDTH,), "2.weight": (WIDTH, WIDTH), "2.bias": (WIDTH,)}
        stage1 = {f"model.mm_projector.{name}": torch.randn(shape) / 4 for name, shape in shapes.items()}
        torch.save(stage1, folder / "mm_projector.bin")
        self.given = {**self.base, **self.data, "pretrain_mm_mlp_adapter": str(folder / "mm_projector.bin")}

    def flags(self, variant: str, stage: int, name: str | None = None, **more: object) -> dict[str, object]:
        config = tight_config(self.folder) if stage == 3 else ds_config(stage)
        flags = {
            "lora_enable": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_modules": PARTS[self.part],
            "max_steps": STEPS, "lr_scheduler_type": "constant", "learning_rate": RATE, "shuffle": False,
            "train_batch_size": BATCH, "weight_decay": 0.0, "version": "v1",
        } | VARIANTS[variant] | (EXPERTS if self.part == "experts" else {})  # fmt: skip
        if variant == "chosen":
            flags |= ({} if self.part in ("projector", "experts") else PATTERNS) | CHOSEN[self.part]
        flags = toy_run(self.given, self.folder / (name or f"{variant}-{stage}"), config, **flags, **more)
        return {key: value for key, value in flags.items() if key != "mm_projector_lr"}

    def args(self, variant: str):
        return parse_arguments(command_line(self.flags(variant, 2)))[0].model


class Theirs(nn.Module):
    """LLaVA as its class names it: a causal language model with model.mm_projector and model.vision_tower, which peft
    opens adapters over. Of transformers' own classes."""

    def __init__(self, runs: Runs, plan) -> None:
        super().__init__()
        self.plan = plan
        model = AutoModelForCausalLM.from_pretrained(runs.base["model_name_or_path"], dtype=torch.float32)
        projector = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        saved = torch.load(runs.folder / "mm_projector.bin")
        projector.load_state_dict({k.removeprefix("model.mm_projector."): v for k, v in saved.items()})
        model.model.mm_projector = projector
        model.model.vision_tower = nn.Module()
        model.model.vision_tower.vision_tower = nn.Module()
        tower = CLIPVisionModel.from_pretrained(runs.base["vision_tower"], dtype=torch.float32)
        model.model.vision_tower.vision_tower.vision_model = tower
        self.model = model

    @property
    def causal(self) -> nn.Module:
        return self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model

    def logits(self, batch) -> torch.Tensor:
        """(T, V) of a single sample."""
        inner, images = self.causal.model, self.plan.images
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (images.mean, images.std))
        pixels = (batch.pixel_values.float() / 255 - mean) / std
        tower = inner.vision_tower.vision_tower.vision_model
        features = inner.mm_projector(tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:])
        embeds, _ = merge_features(self.causal.get_input_embeddings()(batch.input_ids), features, batch.placing, None)
        return self.causal(inputs_embeds=embeds, use_cache=False).logits[0]

    def parts_of(self, layers: list[str]) -> list[str]:
        """The linear layers of the named parts."""
        found = []
        for name, module in self.model.named_modules():
            part = "language"
            part = "projector" if name.startswith("model.mm_projector") else part
            part = "vision" if name.startswith("model.vision_tower") else part
            if isinstance(module, nn.Linear) and name != "lm_head" and part in layers:
                found.append(name)
        return found + [name for name, p in self.model.named_parameters() if p.ndim == 3]


def with_peft(theirs: Theirs, args) -> None:
    """What peft makes of the same settings; its own drawing, decompositions and magnitudes."""
    flags = args.own["lora"]
    parts, targets = flags.lora_modules.split(","), flags.lora_target_modules
    if targets is None:
        targets = theirs.parts_of(parts)
    elif "|" not in targets:
        wanted = targets.split(",")
        targets = [n for n in theirs.parts_of(parts) if any(f".{n}".endswith(f".{word}") for word in wanted)]
    # peft takes parts of words, too: norm is any layernorm there.
    saved = (flags.modules_to_save or "").split(",")
    saved = [n for n, _ in theirs.model.named_modules() if any(w and f".{n}".endswith(f".{w}") for w in saved)]
    is_pattern = isinstance(targets, str)
    stacked = [] if is_pattern else [name for name in targets if "experts." in name]
    config = peft.LoraConfig(
        target_parameters=stacked or None, r=flags.lora_r, lora_alpha=flags.lora_alpha, lora_dropout=0.0,
        target_modules=targets if is_pattern else [name for name in targets if name not in stacked],
        use_rslora=flags.use_rslora, use_dora=flags.use_dora,
        init_lora_weights=True if args.own["lora"].init_lora_weights == "true" else flags.init_lora_weights,
        rank_pattern=json.loads(flags.lora_rank_pattern or "{}"),
        alpha_pattern=json.loads(flags.lora_alpha_pattern or "{}"),
        modules_to_save=saved or None,
    )  # fmt: skip
    theirs.model = peft.get_peft_model(theirs.model, config)
    if "projector" not in parts:
        theirs.causal.model.mm_projector.requires_grad_(True)


@torch.no_grad()
def drawn_by_us(theirs: Theirs, runs: Runs, plan, args) -> None:
    """Give peft's model the matrices that the seed draws here, where they are drawn."""
    if args.own["lora"].init_lora_weights not in ("true", "gaussian"):
        return
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    ours = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, alone)
    places = dict(theirs.causal.named_parameters())
    for name, p in ours.named_parameters():
        if ".lora_A." in name:
            places[plan.own["lora"].rename(name)].copy_(p)


def plain_loop(runs: Runs, variant: str) -> tuple[list[float], Theirs, list]:
    """Losses of a loop over peft's model and torch's AdamW, the model that it leaves, and the samples."""
    args = runs.args(variant)
    plan = plan_model(args, 512)
    tokenizer = AutoTokenizer.from_pretrained(runs.base["model_name_or_path"])
    dataset = toys.encoded(
        *runs.data.values(), tokenizer=tokenizer, cache_dir=runs.folder / "cache-theirs",
        images=plan.tower.image_options(parse_arguments(command_line(runs.flags(variant, 2)))[0]),
    )  # fmt: skip
    batches = [collate([dataset[i]], dataset.image_options) for i in range(len(dataset))]
    theirs = Theirs(runs, plan)
    with_peft(theirs, args)
    drawn_by_us(theirs, runs, plan, args)
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    curve = []
    for step in range(STEPS):
        chosen = [batches[i % len(batches)] for i in range(step * BATCH, (step + 1) * BATCH)]
        total, losses_of_step = sum(len(batch.targets) for batch in chosen), []
        for batch in chosen:
            logits = theirs.logits(batch).index_select(0, batch.target_positions)
            loss = F.cross_entropy(logits, batch.targets, reduction="sum") / total
            loss.backward()
            losses_of_step.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        curve.append(sum(losses_of_step))
    return curve, theirs.eval(), batches


@torch.no_grad()
def opened_by_peft(runs: Runs, folder: Path, plan) -> Theirs:
    """peft over the unchanged base, with the projector that the folder has beside the adapter."""
    theirs = Theirs(runs, plan)
    beside = torch.load(folder / "non_lora_trainables.bin", weights_only=True)
    prefix = "base_model.model.model.mm_projector."
    theirs.model.model.mm_projector.load_state_dict({k.removeprefix(prefix): v for k, v in beside.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.model = peft.PeftModel.from_pretrained(theirs.model, folder)
    return theirs.eval()


def merged_logits(runs: Runs, folder: Path, plan, batch) -> torch.Tensor:
    """The logits of a llava-hf folder's tensors, put into transformers' parts."""
    tensors, theirs = load_file(folder / "model.safetensors"), Theirs(runs, plan)
    rows = theirs.model.get_input_embeddings().weight.shape[0]
    own = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model."):
            name = name.removeprefix("language_model.")
            own[name] = tensor[:rows] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
        elif name.startswith("vision_tower."):
            own[f"model.vision_tower.{name}"] = tensor
        else:
            own[name.replace("multi_modal_projector.linear_1", "model.mm_projector.0").replace(
                "multi_modal_projector.linear_2", "model.mm_projector.2"
            )] = tensor  # fmt: skip
    assert not theirs.model.load_state_dict(stack_experts(own), strict=False).unexpected_keys
    return theirs.eval().logits(batch)


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' matrices by the names on disk to a layer's tensors in memory."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        parts = {
            kind: torch.stack([tensors[f"{block}.experts.{i}.{kind}.weight"] for i in range(NUM_EXPERTS)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        found[f"{block}.experts.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        found[f"{block}.experts.down_proj"] = parts["down_proj"]
    return found


def close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    assert difference < limit, difference


@pytest.fixture(scope="module", params=PARTS)
def runs(request, tmp_path_factory) -> Runs:
    found = Runs(tmp_path_factory.mktemp(f"variants-{request.param}"), request.param)
    saves = {"save_strategy": "steps", "save_steps": STEPS}
    todo = [found.flags(variant, stage, **saves) for variant in cases(request.param) for stage in STAGES]
    output = run_many(2, found.folder / "launch", todo, timeout_s=2400)
    lines = [line for line in output.splitlines() if line.startswith("adapter: ")]
    assert len(lines) == len(todo) and all("reloaded with peft, logits differ by" in line for line in lines)
    return found


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_stage_trains_as_peft_in_a_plain_loop_and_leaves_what_peft_opens_and_merges(runs, variant):
    if variant not in cases(runs.part):
        pytest.skip("not of this part")
    check(runs, variant, STAGES)


def check(runs: Runs, variant: str, stages: tuple[int, ...]) -> None:
    expected, theirs, batches = plain_loop(runs, variant)
    assert expected[-1] < expected[0] - 0.01
    for stage in stages:
        folder = runs.folder / f"{variant}-{stage}"
        found = losses(folder)
        assert np.abs(np.subtract(found, expected)).max() < 1e-5, (stage, found, expected)
        with torch.no_grad():
            wanted, batch = theirs.logits(batches[0]), batches[0]
            opened = opened_by_peft(runs, folder, theirs.plan)
            reopened = opened.logits(batch)
            close(reopened, wanted, 2e-4)  # five steps of Adam apart
            opened.model = opened.model.merge_and_unload()
            close(opened.logits(batch), reopened, 2e-5)
            for source in (folder, folder / f"checkpoint-{STEPS}"):
                out = folder / "merged"
                more = ["--version", "v1", "--vision_tower", runs.base["vision_tower"]] if source == folder else []
                run_script("export.py", source, "--format", "hf", "--output_dir", out, "--overwrite", *more)
                close(merged_logits(runs, out, theirs.plan, batch), reopened, 2e-5)
            run_script("export.py", folder / f"checkpoint-{STEPS}", "--output_dir", folder / "again", "--overwrite")
            left = [json.loads((each / "adapter_config.json").read_text()) for each in (folder, folder / "again")]
            assert left[0] == left[1]
            one, other = (load_file(each / "adapter_model.safetensors") for each in (folder, folder / "again"))
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "variants", "dropout"), [("all", ("dora", "pissa", "together"), 0.2), ("experts", ("plain",), 0.0)]
)
def test_a_broken_off_run_goes_on_to_the_same_weights(tmp_path, part, variants, dropout):
    """With magnitudes, with matrices that began as parts of the weights, and on experts: bit for bit, at two stages."""
    runs, saved, todo = Runs(tmp_path, part), 2, []
    more = {"save_strategy": "steps", "save_steps": saved, "lora_dropout": dropout}
    names = []
    for variant in variants:
        for stage in (2, 3):
            name = f"{variant}-{stage}"
            flags = {**runs.flags(variant, stage), **more}
            resumed = {**flags, "output_dir": tmp_path / f"{name}-resumed"}
            todo += [flags, {**resumed, "resume": tmp_path / name / f"checkpoint-{saved}"}]
            names.append(name)
    run_many(2, tmp_path / "launch", todo, timeout_s=1800)
    for name in names:
        one, other = (tmp_path / each for each in (name, f"{name}-resumed"))
        assert losses(one)[saved:] == losses(other)
        ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (one, other))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.long
def test_what_trains_behind_frozen_layers_trains_alike_at_every_stage(tmp_path):
    """LoRA and last layers behind all that is frozen, where what comes into a layer has no gradient of its own."""
    runs, todo = Runs(tmp_path, "language"), []
    without = ("lora_enable", "lora_r", "lora_alpha", "lora_dropout", "lora_modules")
    last = {
        "freeze_backbone": True, "freeze_mm_mlp_adapter": True, "unfreeze_topk_llm": 1, "unfreeze_topk_vision": 1,
    }  # fmt: skip
    for stage in (0, 3):
        todo.append(runs.flags("plain", stage, freeze_mm_mlp_adapter=True))
        flags = runs.flags("plain", stage, f"last-{stage}", **last)
        todo.append({name: value for name, value in flags.items() if name not in without})
    run_many(2, tmp_path / "launch", todo, timeout_s=900)
    for name in ("plain", "last"):
        one, other = (losses(tmp_path / f"{name}-{stage}") for stage in (0, 3))
        assert np.abs(np.subtract(one, other)).max() < 1e-5 and one[-1] < one[0] - 0.01
    base = {
        f"language_model.{name}": tensor
        for name, tensor in load_file(tmp_path / "base" / "llama" / "model.safetensors").items()
    } | {
        f"vision_tower.vision_model.{name.removeprefix('vision_model.')}": tensor
        for name, tensor in load_file(tmp_path / "base" / "clip" / "model.safetensors").items()
    }
    for stage in (0, 3):
        after = load_file(tmp_path / f"last-{stage}" / "model.safetensors")
        changed = {n for n, t in after.items() if n in base and not torch.equal(t[: len(base[n])], base[n])}
        trained = ("language_model.model.layers.1.", "vision_tower.vision_model.encoder.layers.1.")
        ends = ("language_model.lm_head.weight",)  # which --freeze_backbone leaves training
        assert all(name.startswith(trained + ends) for name in changed)
        assert all(any(name.startswith(each) for name in changed) for each in trained + ends)
