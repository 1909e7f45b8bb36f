# T tokens of all samples laid end to end, D language-model width, S supervised positions
"""Token embeddings, targets, losses and gradients are those of LLaVA's own code. See goldens/README.md."""

import itertools
import json

import like_llava
import pytest
import torch
import toys
from safetensors.torch import load_file

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.collate import collate
from llava_ds.data.encode import EncodingOptions
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.model.heads import Logits
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

CASES = json.loads((like_llava.GOLDENS / "forward.json").read_text())
TENSORS = load_file(like_llava.GOLDENS / "forward.safetensors")
STAGES = {"adapter": {"tune_mm_mlp_adapter": True}, "frozen": {"freeze_mm_mlp_adapter": True}}
RANKS = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llava")


@pytest.fixture(scope="module")
def base(folder) -> dict[str, object]:
    """The flags that all cases share."""
    return like_llava.write_base(folder)


def opened(name: str, folder, base, **more: object):
    """The model of a case as its flags say, and its samples in one batch."""
    case = CASES[name]
    flags = {**base, "image_aspect_ratio": "pad", **case["flags"], **more}
    if "vision_tower" in case["flags"]:
        flags["vision_tower"] = like_llava.GOLDENS / case["flags"]["vision_tower"]
    if adapter := like_llava.write_adapter(folder / f"{name}.safetensors", TENSORS, name):
        flags["pretrain_mm_mlp_adapter"] = adapter
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()).replaced(**flags)
    plan = plan_model(args.model, args.data.model_max_length)
    records = like_llava.records(case["data"])
    dataset = toys.encoded(
        str(like_llava.write_records(folder / f"{name}.json", [records[i] for i in case["samples"]])),
        str(base["image_folder"]),
        tokenizer=plan.tokenizer,
        cache_dir=folder / "cache",
        encoding=EncodingOptions("v1", args.data.model_max_length),
        images=plan.tower.image_options(args),
        num_workers=1,
    )
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    choose_trainable(model, args)
    return model, collate([dataset[i] for i in range(len(dataset))], dataset.image_options)


def gradient_norms(model, kind: str) -> dict[str, float]:
    """By LLaVA's names; without biases of keys, whose gradient is rounding: softmax does not see them."""
    norms = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None or name.endswith("k_proj.bias"):
            continue
        part, rest = name.split(".", 1)
        name = {
            "language_model": rest,
            "projector": rest.replace("layers.", "model.mm_projector.", 1),
            "newline": "model.image_newline",
            "vision_tower": rest.replace("tower.", "model.vision_tower.vision_tower.vision_model.", 1),
        }[part]
        norms[name.replace("mm_projector.0.", "mm_projector.") if kind == "linear" else name] = parameter.grad.norm()
    return {name: float(norm) for name, norm in norms.items()}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_are_llavas(name, folder, base):
    case = CASES[name]
    model, batch = opened(name, folder, base)
    assert batch.cu_seqlens.diff().tolist() == case["lengths"]
    assert batch.targets.tolist() == TENSORS[f"{name}/targets"].tolist()
    assert batch.target_positions.tolist() == TENSORS[f"{name}/target_positions"].tolist()

    embeds = model.embed(batch)[0]  # (T, D)
    direction = torch.cos(torch.arange(embeds.shape[1], dtype=torch.float64))  # (D,), one number says them all
    torch.testing.assert_close((embeds.double() @ direction).float(), TENSORS[f"{name}/embeds"], rtol=0, atol=2e-5)

    with torch.no_grad():
        logits = model(batch, Logits(batch.target_positions))  # (S, V)
    losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    torch.testing.assert_close(losses, TENSORS[f"{name}/losses"], rtol=0, atol=4e-5)

    loss = model(batch) / len(batch.targets)
    assert abs(loss.item() - case["loss"]) < 5e-6
    loss.backward()
    assert gradient_norms(model, case["flags"].get("mm_projector_type")) == pytest.approx(
        case["gradient_norms"], rel=2e-5
    )


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_trains_has_llavas_gradients(stage, folder, base):
    model, batch = opened("mlp2x_gelu", folder, base, **STAGES[stage])
    (model(batch) / len(batch.targets)).backward()
    norms = {
        name: norm
        for name, norm in CASES["mlp2x_gelu"]["gradient_norms"].items()
        if ("mm_projector" in name) == (stage == "adapter")
    }
    assert gradient_norms(model, "mlp2x_gelu") == pytest.approx(norms, rel=2e-5)


def test_every_case_shows_in_the_numbers():
    losses = sorted(case["loss"] for case in CASES.values())
    assert all(after - before > 2e-5 for before, after in itertools.pairwise(losses))
