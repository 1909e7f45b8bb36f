"""--enable_ema beside other flags, and where states lie elsewhere; test_ema_on_ranks.py has the averages."""

from types import SimpleNamespace

import pytest
from ds_json import CONFIGS, arguments

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import active


def test_a_decay_alone_averages_nothing():
    needed = ["--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json")]
    with pytest.raises(ConfigError, match="--ema_decay has no effect without --enable_ema True"):
        parse_arguments([*needed, "--ema_decay", "0.9"])


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_an_optimizer_on_nvme_is_refused(device):
    own, config = ["ema"], {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
    if device == "nvme":
        with pytest.raises(ConfigError, match=r"--enable_ema .* can't be offloaded to NVMe"):
            active(own).check(SimpleNamespace(config=config))
    else:
        active(own).check(SimpleNamespace(config=config))
    active(own).check(SimpleNamespace(config={}))


def test_the_average_is_one_more_number_for_each_weight():
    assert (arguments().extra_moments, arguments(enable_ema=True).extra_moments) == (0, 1)
