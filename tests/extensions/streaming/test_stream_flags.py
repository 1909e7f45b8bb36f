"""The flags of training while the data are encoded, and what they can't be with."""

import pytest

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError

PLAIN = ["--output_dir", "out", "--deepspeed_config", "zero2", "--data_path", __file__]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--stream", "--group_by_length", "True"],
            r"--group_by_length True needs all samples before the first step \(.*\), which --stream True takes away",
        ),
        (["--stream", "--tokens_per_micro_batch", "auto"], "auto needs all samples before the first step"),
        (["--stream", "--dry_run"], "--dry_run True needs all samples before the first step"),
        (["--shuffle_buffer_size", "9"], "--shuffle_buffer_size belongs to --stream True"),
        (["--streaming"], "did you mean --stream"),
    ],
)
def test_what_it_can_not_be_with_is_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        parse_arguments([*PLAIN, *flags])
