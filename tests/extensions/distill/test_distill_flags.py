"""Flags of distillation: what is refused before a model is built, and the teacher's memory in the estimate."""

import dataclasses
from pathlib import Path

import llavas
import pytest
import toys
from extension_there import needs_extension
from known_flags import known_words

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import resolve_ds_config
from llava_ds.extensions.distill.extension import plan_teacher
from llava_ds.extensions.distill.flags import Flags
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.plan import PlanDraft


def draft(base: dict[str, str], teacher: str) -> PlanDraft:
    given = {
        "output_dir": "out",
        "deepspeed_config": "zero2",
        "objective": "gkd",
        "teacher_model_name_or_path": teacher,
    }
    given |= {**base, "data_path": __file__, "version": "v1"}
    args, _ = parse_arguments([word for name, value in given.items() for word in (f"--{name}", str(value))])
    plan = plan_model(args.model, 512)
    return PlanDraft(args, plan, plan.tower.image_options(args), Ranks(0, 0, 1, None), None)


def as_one_folder(base: dict[str, str]) -> str:
    """A LLaVA of both models, in another folder."""
    folder = Path(base["vision_tower"]).parent / "llava"
    llavas.write_hf(folder, base, llavas.hf_model(base))
    return str(folder)


def test_a_teacher_with_another_vocabulary_is_refused_with_the_sizes(tmp_path):
    """Rows that no token has may differ in number: makers pad them."""
    base = toys.write_base(tmp_path / "student")
    wider = as_one_folder(toys.write_base(tmp_path / "wider", hidden_size=64, vocab_size=448))
    assert plan_teacher(draft(base, wider)).model.text_config.vocab_size == 448
    other = toys.write_base(tmp_path / "other")
    toys.add_tokens(Path(other["model_name_or_path"]), "<new>")
    with pytest.raises(ConfigError, match=r"--teacher_model_name_or_path .*of 401 tokens differs from the 400 here"):
        plan_teacher(draft(base, as_one_folder(other)))
    with pytest.raises(ConfigError, match=r"--teacher_model_name_or_path .*of 400 tokens differs from the 401 here"):
        plan_teacher(draft(other, as_one_folder(base)))
    with pytest.raises(
        ConfigError, match=r"--teacher_model_name_or_path .* is a language model without a vision tower"
    ):
        plan_teacher(draft(base, base["model_name_or_path"]))


def test_a_run_without_a_teacher_and_weights_on_nvme_are_refused(tmp_path):
    flags = ["--output_dir", "out", "--deepspeed_config", "zero2", "--objective", "gkd"]
    with pytest.raises(ConfigError, match="needs --teacher_model_name_or_path"):
        parse_arguments(flags)
    with pytest.raises(
        ConfigError, match="unknown flag --seq_kd: leave it out, because the teacher samples no answers"
    ):
        parse_arguments([*flags, "--seq_kd", "True"])
    own = {"distill": Flags(teacher_model_name_or_path="t")}
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(learning_rate=1e-3), frozenset(), own)
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    zero["offload_optimizer"] = zero["offload_param"]
    with pytest.raises(ConfigError, match="where the teacher's weights would overwrite the student's"):
        resolve_ds_config({"zero_optimization": zero}, args, dp=1, hidden_size=32, num_steps=10, is_local=False)


@needs_extension("planning")
def test_the_estimate_knows_the_teacher(tmp_path):
    from llava_ds.extensions.planning.memory import Setup, ZeroPlacement, estimate
    from llava_ds.extensions.planning.shapes import shape_of_folders

    base = toys.write_base(tmp_path / "student")
    folder = as_one_folder(toys.write_base(tmp_path / "wider", hidden_size=64))
    one = shape_of_folders(draft(base, folder).args)
    whole = shape_of_folders(draft(base, folder).args.replaced(model_name_or_path=folder, vision_tower=None))
    assert one.second == whole.num_parameters > one.num_parameters
    alone = dataclasses.replace(one, second=0)
    for stage, tp, shards in ((2, 1, 1), (3, 1, 4), (3, 2, 1)):
        both = [estimate(each, ZeroPlacement(stage), Setup(4, weight_bytes=4, tp=tp)) for each in (one, alone)]
        assert both[0].weights - both[1].weights == 4 * -(-one.second // shards)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--gkd_logits_topk 8 --lmbda 0.5", "--gkd_logits_topk has probabilities for the records' answers only"),
        ("--lmbda 1 --sft_alpha 0.1", "--sft_alpha has no effect with --lmbda 1"),
        ("--max_completion_length 8", "--max_completion_length has no effect without --lmbda"),
        ("--lmbda 0.5 --pipeline_parallel_size 2", "the teacher is not divided into stages"),
        ("--lmbda 0.5 --tensor_parallel_size 2", "answers are sampled on one rank"),
        ("--gkd_logits_topk 8 --sequence_parallel_size 2", "needs all tokens of a sample on one rank"),
        ("--lmbda 0.5 --on_loss_spike rewind", "--on_loss_spike rewind can't be used with --lmbda"),
        ("--lmbda 0.5 --stream True --max_steps 9", "prompts are encoded first"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, expected):
    if known_words(flags.split()) != flags.split():
        pytest.skip("an extension of these flags was deleted")
    given = ["--output_dir", "out", "--deepspeed_config", "zero2", "--objective", "gkd", "--data_path", __file__]
    with pytest.raises(ConfigError) as refused:
        parse_arguments([*given, "--teacher_model_name_or_path", ".", *flags.split()])
    assert expected in str(refused.value)


def test_a_teacher_on_disk_takes_no_memory():
    """Its folder is not in the estimate."""
    assert Flags(teacher_model_name_or_path="t").frozen_folder == "t"
    assert Flags(teacher_model_name_or_path="t", gkd_logits_topk=4).frozen_folder is None
