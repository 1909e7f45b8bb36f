"""Ready models whose matrices or layers are shared by two ranks: losses, gradients, exports are those of one rank."""

from pathlib import Path

import numpy as np
import pytest
import ready_models
import toys
from extension_there import AXES
from known_flags import known, known_cases
from launching import command_line, run_many, toy_run
from safetensors.torch import load_file
from sharing import rows, sgd
from textbook_pairs import write_pairs

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_model
from llava_ds.model.open.folder import read_folder

STEPS, BATCH, RATE = 3, 4, 0.02
FIRST, LATER = 1e-6, 2e-5  # relative differences of the first step, and of later ones
TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "per_device_train_batch_size": 2}
DPO = {"objective": "dpo", "beta": 0.3, "eval_fraction": 0.25}
REWARD = {"objective": "reward", "center_rewards_coefficient": 0.01}
TRAINED = {"tune_mm_vision": True, "tune_mm_mlp": True, "tune_mm_llm": True}
QUICK = "internvl"
NO_STAGES = ("gemma4_e",)
NOISY = ("gemma4_e",)  # in float32, rounding moves the gradient of every parameter by 1e-5
TIED = ("gemma3", "gemma4", "qwen2_5_vl")

# ZeRO stage and flags of each run; the first word is the run on one rank that it is compared with.
FEW = {"sft-tp": (3, TP), "sft-pp": (1, PP)}
MORE = {
    **{f"sft-tp-zero{stage}": (stage, TP) for stage in range(4)},
    **{f"sft-pp-zero{stage}": (stage, PP) for stage in (0, 1)},
    "dpo-tp": (2, {**TP, **DPO}),
    "dpo-pp": (1, {**PP, **DPO}),
    "reward-pp": (1, {**PP, **REWARD}),
}
ONE_RANK = {"sft": {}, "dpo": DPO, "reward": REWARD}


class Runs:
    """The runs of a family on one rank and on two."""

    def __init__(self, family: str, folder: Path, wanted: dict[str, tuple[int, dict]]) -> None:
        self.folder, self.is_noisy = folder, family in NOISY
        text = {"num_key_value_heads": 2, "tie_word_embeddings": family in TIED}
        if family == "gemma4":
            text["num_global_key_value_heads"] = 2
        base = ready_models.write_ready(folder / "base", family, **text)
        kinds = "itivtitt" if family in ready_models.WITH_VIDEOS else "itiititt"
        pairs = write_pairs(folder / "pairs", 8)
        data = {"sft": toys.write_data(folder / "data", kinds), "dpo": pairs, "reward": pairs}

        def run(name: str, stage: int, flags: dict) -> dict[str, object]:
            found = toy_run(
                {**base, **data[name.split("-")[0]]}, folder / name, sgd(folder, stage), max_steps=STEPS,
                lr_scheduler_type="constant", shuffle=False, max_grad_norm=1.0, **TRAINED, **flags,
            )  # fmt: skip
            rates = {"learning_rate": RATE, "mm_projector_lr": RATE, "train_batch_size": BATCH}
            own_cache = {"cache_dir": folder / f"cache-{name}"} if name.startswith("dpo") else {}
            return {**found, **rates, **own_cache}

        self.names = list(known_cases(wanted))
        alone = dict.fromkeys(name.split("-")[0] for name in self.names)
        run_many(1, folder / "one", [run(name, 1, ONE_RANK[name]) for name in alone])
        for axis in AXES:  # a process has the groups of one mesh
            of_axis = [run(name, *wanted[name]) for name in self.names if axis in wanted[name][1]]
            if of_axis:
                run_many(2, folder / axis, of_axis)

    def check(self) -> None:
        for name in self.names:
            one, shared = self.folder / name.split("-")[0], self.folder / name
            for key in ("loss", "grad_norm"):
                expected, found = ([row[key] for row in rows(path)] for path in (one, shared))
                if None in found:  # at stage 0 DeepSpeed may have none
                    continue
                first, later = (5 * LATER,) * 2 if self.is_noisy and key == "grad_norm" else (FIRST, LATER)
                assert found[0] == pytest.approx(expected[0], rel=first, abs=0), (name, key)
                assert found == pytest.approx(expected, rel=later, abs=0), (name, key)
            for file in (path.name for path in one.glob("*.safetensors")):
                weights, others = load_file(one / file), load_file(shared / file)
                assert weights.keys() == others.keys()
                for key, weight in weights.items():
                    assert (weight - others[key]).abs().max() <= 1e-5, (name, key)
            if name.startswith("dpo"):
                self.check_evals(name)
            if name == "dpo-pp":
                self.check_reference(name)

    def check_evals(self, name: str) -> None:
        """The eval loss and the metrics of pairs are one rank's."""
        (one,), (shared,) = (rows(self.folder / of, "evals.jsonl") for of in ("dpo", name))
        assert one.keys() == shared.keys() and "rewards/margins" in one
        for key in (name for name in one if name == "loss" or "/" in name):
            assert shared[key] == pytest.approx(one[key], rel=LATER, abs=1e-6), (name, key)

    def check_reference(self, name: str) -> None:
        """The reference's caches, of the training data and of the eval set, have one rank's names and numbers."""
        one, shared = (
            {path.name: np.load(path) for path in (self.folder / of).rglob("reference-*.npy")}
            for of in ("cache-dpo", f"cache-{name}")
        )
        assert len(one) == 2 and one.keys() == shared.keys()
        for file, numbers in one.items():
            assert shared[file] == pytest.approx(numbers, rel=FIRST, nan_ok=True)


@pytest.mark.full
def test_losses_gradients_and_exports_are_those_of_one_rank(tmp_path):
    Runs(QUICK, tmp_path, FEW).check()


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in ready_models.FAMILIES if family not in ready_models.EXPERTS])
def test_so_are_those_of_every_family(tmp_path, family):
    wanted = {name: run for name, run in MORE.items() if "-pp" not in name or family not in NO_STAGES}
    Runs(family, tmp_path, wanted).check()


@pytest.mark.parametrize(
    ("family", "flags", "reason"),
    [
        (
            "gemma4",
            TP,
            "4 heads, with 2 of keys, or 4 heads, with 1 of keys, can't be divided over 2 ranks: leave the flag out",
        ),
        ("gemma4_e", PP, "embed_tokens_per_layer is not a layer"),
    ],
)
def test_what_does_not_go_is_refused(tmp_path, family, flags, reason):
    if not known(flags):
        pytest.skip("there is no such extension")
    folder = ready_models.write_ready(tmp_path, family)["model_name_or_path"]
    given = {"output_dir": "here", "deepspeed_config": __file__, **flags}
    with pytest.raises(ConfigError, match=reason):
        check_model(parse_arguments(command_line(given))[0], read_folder(folder, None).text_config)
