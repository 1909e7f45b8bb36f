"""The sizes of the mesh in flags and JSON, and what can't be trained on it."""

import pytest

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import for_engine
from llava_ds.extensions.base import Axis
from llava_ds.runtime.mesh import check_sizes


def arguments(*flags: str):
    needed = ["--output_dir", "here", "--deepspeed_config", __file__]
    return parse_arguments([*needed, *flags])[0]


@pytest.mark.parametrize(
    ("world_size", "sp", "tp", "pp", "said"),
    [
        (8, 1, 1, 1, None),
        (8, 2, 4, 1, None),
        (8, 2, 1, 4, None),
        (6, 1, 1, 4, "--pipeline_parallel_size 4 does not divide 6 ranks: give one of 1, 2, 3, 6, or start another"),
        (4, 4, 1, 2, "--sequence_parallel_size 4 times --pipeline_parallel_size 2 is 8 and does not divide 4 ranks"),
        (6, 4, 1, 1, "--sequence_parallel_size 4 does not divide 6 ranks: give one of 1, 2, 3, 6, or start another"),
        (6, 1, 4, 1, "--tensor_parallel_size 4 does not divide 6 ranks: give one of 1, 2, 3, 6, or start another"),
        (
            2,
            2,
            2,
            1,
            "2 times --tensor_parallel_size 2 is 4 and does not divide 2 ranks: give one of 1 x 1, 1 x 2, 2",
        ),
    ],
)
def test_axes_fit_the_ranks(world_size, sp, tp, pp, said):
    sizes = {"sequence": sp, "tensor": tp, "pipeline": pp}
    axes = [Axis(name, f"{name}_parallel_size", size, 1, True) for name, size in sizes.items() if size > 1]
    if said is None:
        check_sizes(world_size, axes)
        return
    with pytest.raises(ConfigError, match=said):
        check_sizes(world_size, axes)


def test_deepspeed_is_not_told_how_many_samples_a_step_has():
    micro = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config = {"train_batch_size": 8, **micro, "zero_optimization": {"stage": 2}}
    assert for_engine(config) == {**micro, "zero_optimization": {"stage": 2}}
    assert "train_batch_size" in config
    assert for_engine({"train_batch_size": 8}) == {"train_batch_size": 8}  # of inference, which has no other number
