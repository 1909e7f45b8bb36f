"""A resumed run has to start from the same models, wherever their folders lie and whichever of them there are."""

import dataclasses
import json
import shutil
from pathlib import Path

import llavas
import pytest
import torch
import toys
from extension_there import AXES, needs_extension
from known_flags import needs

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.commit import TRAINER
from llava_ds.checkpoint.comparison import Comparison
from llava_ds.checkpoint.resume import find_resume_point, saved_batch_size
from llava_ds.checkpoint.run_identity import RunIdentity, saved_identity
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.model.open.folder import take_from_model
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
CONFIG = {"zero_optimization": {"stage": 3}}


def identity(given: dict[str, object]) -> RunIdentity:
    args, _ = take_from_model(llavas.arguments(given))
    return RunIdentity.of(args, "data", 2, CONFIG)


def run(world_size: int = 2, stage: int = 3, data: str = "data", optimizer: dict | None = None, **flags) -> RunIdentity:
    """The identity of a run on the tiny model."""
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    args = args.replaced(**{"train_batch_size": 4, "output_dir": "out", **flags})
    return RunIdentity.of(args, data, world_size, {"zero_optimization": {"stage": stage}, "optimizer": optimizer})


def differences(now: RunIdentity, before: dict) -> dict[str, str]:
    return Comparison(now, before).differences()


def saved(folder: Path, step: int, of: RunIdentity, with_layout: bool = True) -> Path:
    """A checkpoint of a run with nothing of an engine in it."""
    scratch = commit.begin(folder, step, RANKS)
    trainer = {"step": step, "identity": dataclasses.asdict(of)}
    (scratch / TRAINER).write_text(json.dumps(trainer))
    if with_layout:
        (scratch / "layout-0.json").write_text("{}")
    return commit.commit(scratch, {}, None, RANKS)


def test_a_model_that_brings_its_tower_has_an_identity(tmp_path):
    base = toys.write_base(tmp_path / "base")
    flags = llavas.write_hf(tmp_path / "hf", base, llavas.hf_model(base))
    first = identity(flags)
    assert first.flags["vision_tower"] is None and first.flags["model_base"] is None
    shutil.copytree(tmp_path / "hf", tmp_path / "elsewhere")
    assert identity({"model_name_or_path": str(tmp_path / "elsewhere")}) == first
    with (tmp_path / "hf" / "config.json").open("a") as file:
        file.write("\n")
    assert list(differences(identity(flags), vars(first))) == ["model_name_or_path"]


@needs_extension("lora")
def test_the_base_under_an_adapter_belongs_to_it(tmp_path):
    base = toys.write_base(tmp_path / "base")
    flags = llavas.write_idle_adapter(tmp_path / "adapter", base, {"model.mm_projector.0.bias": torch.ones(32)})
    first = identity(flags)
    assert first.flags["model_base"] is not None
    config = Path(base["model_name_or_path"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5e5}))
    assert list(differences(identity(flags), vars(first))) == ["model_base"]


def chosen(resume: str, output_dir: Path) -> object:
    return saved_identity(resume, output_dir)["flags"]["tokens_per_micro_batch"]


def test_what_a_run_chose_for_itself_is_read_from_its_newest_checkpoint(tmp_path):
    for step, tokens in ((2, 640), (10, 704), (4, 640)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        trainer = {"step": step, "identity": dataclasses.asdict(run(tokens_per_micro_batch=tokens))}
        (tmp_path / f"checkpoint-{step}" / TRAINER).write_text(json.dumps(trainer))
    assert chosen("auto", tmp_path) == 704
    assert chosen(str(tmp_path / "checkpoint-2"), tmp_path / "other") == 640
    (tmp_path / "checkpoint-10" / TRAINER).write_text("{")  # damaged
    assert chosen("auto", tmp_path) == 640
    assert saved_identity("never", tmp_path) == saved_identity("auto", tmp_path / "other") == {}


def test_another_size_or_layout_is_no_other_run_and_is_said(tmp_path):
    path = saved(tmp_path, 3, run(world_size=4, stage=1, per_device_train_batch_size=1))
    now = run(world_size=2, stage=3, per_device_train_batch_size=2)
    point, lines = find_resume_point("auto", tmp_path, now)
    assert (point.path, point.step, point.world_size, point.changed) == (path, 3, 4, False)
    assert lines == [
        "only rounding changes: --per_device_train_batch_size is 2, was 1",
        "only rounding changes: world_size is 2, was 4",
        "only rounding changes: zero_stage is 3, was 1",
        f"resuming from {path}",
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"loss_reduction": "micro_batch"}, "--loss_reduction micro_batch"),
        ({"steps_across_epochs": True}, "--steps_across_epochs"),
        pytest.param(
            {"capacity_factor": 1.5, "router_aux_loss_coef": 0.01},
            "--capacity_factor, --router_aux_loss_coef",
            marks=needs_extension("mixtures"),
        ),
        pytest.param({"router_aux_loss_coef": 0.01}, "--router_aux_loss_coef", marks=needs_extension("mixtures")),
    ],
)
def test_where_the_loss_depends_on_the_layout_another_size_is_another_run(tmp_path, flags, named):
    saved(tmp_path, 3, run(world_size=4, tokens_per_micro_batch=512, **flags))
    now = run(world_size=2, tokens_per_micro_batch=1024, **flags)
    with pytest.raises(ConfigError) as refused:
        find_resume_point("auto", tmp_path, now)
    for change in ("world_size is 2, was 4", "--tokens_per_micro_batch is 1024, was 512"):
        assert f"  {change}; this changes the result with {named}\n" in str(refused.value)
    point, _ = find_resume_point("auto", tmp_path, now, "world_size,tokens_per_micro_batch")
    assert point.changed


@needs_extension("mixtures")
def test_ranks_that_share_samples_or_experts_change_no_routers_loss():
    before = vars(run(world_size=2, router_aux_loss_coef=0.01))
    for flag in AXES:
        assert not differences(run(world_size=4, router_aux_loss_coef=0.01, **{flag: 2}), before)
    assert not differences(run(world_size=2, ep_size=2, router_aux_loss_coef=0.01), before)


@pytest.mark.parametrize(
    ("order", "flag", "other"),
    [
        ("group_by_length", "per_device_train_batch_size", "gradient_accumulation_steps"),
        ("group_by_modality_length_auto", "per_device_train_batch_size", "gradient_accumulation_steps"),
        ("group_by_varlen", "gradient_accumulation_steps", "per_device_train_batch_size"),
    ],
)
def test_an_order_that_depends_on_the_layout_makes_another_of_it_another_run(order, flag, other):
    before = vars(run(**{order: True, flag: 1, other: 2}))
    assert list(differences(run(**{order: True, flag: 2, other: 2}), before)) == [flag]
    now = run(**{order: True, flag: 1, other: 1})
    assert not differences(now, before) and any(other in line for line in Comparison(now, before).reshaped())
    plain = vars(run(**{flag: 1}))
    assert not differences(run(**{flag: 2}), plain)


def test_a_changed_flag_is_refused_with_both_values_until_it_is_allowed(tmp_path):
    path = saved(tmp_path, 3, run())
    now = run(learning_rate=1e-4, bf16=True, data="other", optimizer={"type": "SGD"})
    with pytest.raises(ConfigError) as refused:
        find_resume_point("auto", tmp_path, now)
    for line in (
        "--learning_rate is 0.0001, was 2e-05",
        "--bf16 is True, was False",
        "the data set or its encoding has changed",
        'optimizer in the DeepSpeed JSON is {"type": "SGD"}, was null',
        "--allow_changed_flags bf16,learning_rate,data,optimizer",
    ):
        assert line in str(refused.value).replace("learning_rate,bf16", "bf16,learning_rate")
    with pytest.raises(ConfigError) as refused:
        find_resume_point(str(path), tmp_path / "elsewhere", now, "learning_rate, --bf16,data")
    assert "optimizer in" in str(refused.value) and "--learning_rate is" not in str(refused.value)
    for allowed in ("all", "learning_rate,bf16,data,optimizer"):
        point, lines = find_resume_point("auto", tmp_path, now, allowed)
        assert point.changed and "allowed to change: --learning_rate is 0.0001, was 2e-05" in lines


def test_other_data_are_described_by_who_knows_them(tmp_path):
    path = saved(tmp_path, 3, run())
    asked = []

    def about(run_dir: Path) -> str:
        asked.append(run_dir)
        return "1 of 2 image files have other contents: a.png"

    with pytest.raises(ConfigError, match=r"has changed: 1 of 2 image files have other contents: a\.png"):
        find_resume_point("auto", tmp_path, run(data="other"), None, about)
    assert asked == [path.parent]
    find_resume_point("auto", tmp_path, run(), None, about)
    assert len(asked) == 1


def test_adam_with_the_flags_numbers_is_one_optimizer_whichever_code_computes_it(tmp_path):
    params = {"lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
    saved(tmp_path, 3, run())
    for own in ({}, {"torch_adam": True}, {"adam_w_mode": True}):
        now = run(optimizer={"type": "AdamW", "params": {**params, **own}})
        _, lines = find_resume_point("auto", tmp_path, now)
        assert lines[0].startswith('only rounding changes: optimizer in the DeepSpeed JSON is {"type": "AdamW"')
    for own in ({"betas": [0.8, 0.999]}, {"adam_w_mode": False}, {"amsgrad": True}):
        with pytest.raises(ConfigError, match="optimizer in the DeepSpeed JSON is"):
            find_resume_point("auto", tmp_path, run(optimizer={"type": "Adam", "params": {**params, **own}}))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rat", "did you mean learning_rate"),
        ("save_steps", "does not change the result"),
        ("?", "give flag names"),
    ],
)
def test_names_that_are_not_compared_are_refused_even_without_a_checkpoint(tmp_path, name, hint):
    with pytest.raises(ConfigError, match=hint):
        find_resume_point("auto", tmp_path, run(), name)


def test_samples_per_step_that_differ_are_refused_with_what_keeps_them(tmp_path):
    saved(tmp_path, 3, run(world_size=4, train_batch_size=24))
    with pytest.raises(ConfigError, match=r"--train_batch_size is 12, was 24") as refused:
        find_resume_point("auto", tmp_path, run(train_batch_size=12))
    ways = "12 x 1 or 6 x 2 or 4 x 3 or 3 x 4 or 2 x 6 or 1 x 12"
    assert (
        f"24 samples per step on 2 ranks are --per_device_train_batch_size x --gradient_accumulation_steps = {ways}"
        in (str(refused.value))
    )
    with pytest.raises(ConfigError, match="5 ranks can't share the 24 samples of a step evenly"):
        find_resume_point("auto", tmp_path, run(world_size=5, train_batch_size=15))


def test_samples_per_step_are_kept_where_the_flags_leave_them_open(tmp_path):
    saved(tmp_path, 3, run(world_size=4, train_batch_size=24))

    def kept(world_size: int, *given: str, **flags) -> int | None:
        args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset(given))
        return saved_batch_size(args.replaced(output_dir=str(tmp_path), **flags), world_size)

    assert kept(2) == kept(2, "per_device_train_batch_size") == kept(8, "gradient_accumulation_steps") == 24
    assert kept(4) is None and kept(2, "train_batch_size") is None
    assert kept(2, "per_device_train_batch_size", "gradient_accumulation_steps") is None
    assert kept(2, resume="never") is None
    with pytest.raises(
        ConfigError, match=r"24 samples per step, and 5 ranks can't share them evenly: start 1, 2, 3, 4, 6"
    ):
        kept(5)


def test_what_can_not_be_cut_anew_is_refused_before_a_model_is_built(tmp_path):
    saved(tmp_path / "muon", 3, run(world_size=4, optimizer={"type": "Muon"}))
    with pytest.raises(
        ConfigError, match=r"Muon keeps whole matrices, .*start 4 ranks at ZeRO-3, or give --resume never"
    ):
        find_resume_point("auto", tmp_path / "muon", run(optimizer={"type": "Muon"}))
    assert find_resume_point("auto", tmp_path / "muon", run(world_size=4, optimizer={"type": "Muon"}))[0].step == 3
    saved(tmp_path / "old", 3, run(world_size=4), with_layout=False)
    with pytest.raises(ConfigError, match="an earlier version saved it"):
        find_resume_point("auto", tmp_path / "old", run())
    assert find_resume_point("auto", tmp_path / "old", run(world_size=4))[0].step == 3


def test_variables_of_the_chat_template_count_by_their_values(tmp_path):
    off = run(chat_template_kwargs='{"enable_thinking": false, "effort": "low"}')
    saved(tmp_path, 2, off)
    before = saved_identity("auto", tmp_path)
    assert not differences(run(chat_template_kwargs='{"effort":"low","enable_thinking":false}'), before)
    for other in ('{"enable_thinking": true, "effort": "low"}', '{"enable_thinking": false}', None):
        assert list(differences(run(chat_template_kwargs=other), before)) == ["chat_template_kwargs"]
    assert list(differences(off, vars(run()))) == ["chat_template_kwargs"]


def test_more_rows_are_another_run():
    """A checkpoint has the shapes of its own embedding."""
    grown = run(resize_token_embeddings=True, pad_embeddings_to_multiple_of=64)
    changes = list(differences(run(), vars(grown)))
    assert changes == ["resize_token_embeddings", "pad_embeddings_to_multiple_of"]
    assert list(differences(grown, vars(run(resize_token_embeddings=True)))) == ["pad_embeddings_to_multiple_of"]
    before = {
        **vars(run()),
        "flags": {k: v for k, v in run().flags.items() if k not in changes},
    }  # of an earlier version
    assert not differences(run(), before) and list(differences(grown, before)) == changes


@needs("lora_enable")
def test_a_flag_that_is_left_out_at_a_resume_is_a_difference(tmp_path):
    """Also where its feature is not loaded, so that the new run does not have the flag at all."""
    absent = ("lora_enable", "lora_r")
    now = dataclasses.replace(run(), flags={k: v for k, v in run().flags.items() if k not in absent})
    before = vars(run(lora_enable=True))
    assert differences(now, before) == {"lora_enable": "--lora_enable is False, was True"}
    assert differences(dataclasses.replace(now, flags={**now.flags, "lora_enable": True}), before) == {}
    assert not differences(now, vars(run()))
    unknown = {**before, "flags": {**vars(run())["flags"], "of_an_earlier_version": 3, "output_dir": "elsewhere"}}
    assert not differences(now, unknown)  # and flags that a resume may change since
    saved(tmp_path, 3, run(lora_enable=True))
    with pytest.raises(ConfigError, match="--lora_enable is False, was True"):
        find_resume_point("auto", tmp_path, now)
    assert find_resume_point("auto", tmp_path, now, "lora_enable")[0].changed
