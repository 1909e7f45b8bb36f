"""The estimate of model states against the tensors that really exist, on real ranks."""

import json
from pathlib import Path

import pytest
import toys
from known_flags import known, known_cases
from launching import command_line, ds_config, launch

from llava_ds.config.parsing import parse_arguments
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.extensions.planning.auto import Data, Devices, planned_run
from llava_ds.extensions.planning.fit import Run
from llava_ds.extensions.planning.shapes import shape_of_folders

MEASURE = Path(__file__).with_name("memory_of_ranks.py")
LLAMA = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4}
CLIP = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
# A vocabulary that outweighs the layers, tied, and widths that no number of ranks divides.
UNEVEN = {
    "hidden_size": 72, "intermediate_size": 187, "num_hidden_layers": 3, "vocab_size": 9001, "tie_word_embeddings": True
}  # fmt: skip
STATES = ("weights", "gradients", "optimizer")
LORA = {"lora": {"lora_enable": True}, "qlora": {"lora_enable": True, "bits": 4}}
# ZeRO stage, precision, what trains, micro-batches a step.
CASES = [(stage, "fp32", trains, 1) for trains in ("projector", "all") for stage in (0, 1, 2, 3)]
CASES += [(stage, "bf16", "all", 2) for stage in (0, 1, 2, 3)]
CASES += [(2, "fp32", "lora", 1), (3, "fp32", "lora", 1), (2, "bf16", "qlora", 1), (3, "bf16", "qlora", 1)]
CASES = [case for case in CASES if known(LORA.get(case[2], {}))]
SHARED = [(stage, "fp32", "all", 1) for stage in (0, 1, 2, 3)] + [(stage, "bf16", "all", 2) for stage in (1, 3)]
AXES = {  # ranks, flags
    "sp2": (2, {"sequence_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "dp2xtp2": (4, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2xdp2": (4, {"pipeline_parallel_size": 2}),
}
AXES = known_cases(AXES)


def flags_of(
    base: dict, data: dict, folder: Path, stage: int, precision: str, trains: str, accumulation: int
) -> dict[str, object]:
    return {
        **base,
        **data,
        "deepspeed_config": ds_config(stage),
        "output_dir": folder / f"{stage}-{precision}-{trains}",
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "bf16": precision == "bf16",
        "tune_mm_mlp_adapter": trains == "projector",
        **LORA.get(trains, {}),
        "save_strategy": "no",
        "resume": "never",
    }


def measured(
    ranks: int, folder: Path, llama: dict, clip: dict, wanted: list[tuple] = CASES, **axes: int
) -> dict[tuple, tuple[Run, list[dict[str, int]]]]:
    """The planned memory and that of every rank, for every case, all in one launch. axes: flags of the mesh."""
    folder.mkdir()
    base = toys.write_base(folder / "base", clip=clip, **llama)
    data = toys.write_data(folder / "data", "itit" * 4)
    flags = {case: command_line(flags_of(base, data, folder, *case) | axes) for case in wanted}
    cases = folder / "cases.json"
    outs = {case: folder / f"measured-{i}" for i, case in enumerate(wanted)}
    cases.write_text(json.dumps([{"flags": flags[case], "out": str(outs[case])} for case in wanted]))
    done = launch(ranks, MEASURE, str(cases))
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        case: (
            planned(flags[case], ranks),
            [json.loads(Path(f"{outs[case]}-{r}.json").read_text()) for r in range(ranks)],
        )
        for case in wanted
    }


def planned(flags: list[str], ranks: int) -> Run:
    args, _ = parse_arguments(flags)
    shape = shape_of_folders(args)
    raw = read_ds_config(args.training.deepspeed_config)
    dp = ranks // args.ranks_per_sample
    resolved = resolve_ds_config(raw, args, dp=dp, hidden_size=shape.text.hidden)
    return planned_run(shape, resolved, Data(512, 0.25, share=512), Devices(ranks, 8))


def check(run: Run, ranks: list[dict[str, int]]) -> None:
    """Every part of the model states, and their sum, within 5 % of the fullest rank; little else exists."""
    expected = run.estimate()
    for part in STATES:
        most = max(rank[part] for rank in ranks)
        assert getattr(expected, part) == pytest.approx(most, rel=0.05), part
    assert expected.model_states == pytest.approx(max(sum(r[p] for p in STATES) for r in ranks), rel=0.05)
    for rank in ranks:
        assert rank["gathered"] <= expected.gathered and rank["buckets"] <= expected.buffers
        # Rotary tables, images, counters, and a bucket that is not yet collected.
        assert rank["unnamed"] <= expected.buffers + 0.02 * expected.model_states


@pytest.fixture(scope="module", params=[1, 2])
def on_ranks(request, tmp_path_factory):
    return measured(request.param, tmp_path_factory.mktemp("memory") / "even", LLAMA, CLIP)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_model_states_are_what_exists(on_ranks, case):
    check(*on_ranks[case])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_model_states_of_an_uneven_model_are_what_exists(tmp_path, ranks):
    for case, found in measured(ranks, tmp_path / "uneven", UNEVEN, {**CLIP, "hidden_size": 52}).items():
        print(case)
        check(*found)


@pytest.mark.long
@pytest.mark.parametrize("mesh", AXES)
def test_model_states_of_ranks_that_share_are_what_exists(tmp_path, mesh):
    ranks, flags = AXES[mesh]
    wanted = [case for case in SHARED if case[0] < 2] if mesh.startswith("pp") else SHARED
    for case, found in measured(ranks, tmp_path / mesh, LLAMA, CLIP, wanted, **flags).items():
        print(case)
        check(*found)
