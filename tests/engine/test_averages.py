"""--enable_ema where the optimizer's states lie elsewhere; tests/distributed/test_averages.py has the averages."""

import pytest

from llava_ds.constants import ConfigError
from llava_ds.engine.averages import refuse_nvme


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_an_optimizer_on_nvme_is_refused(device):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
    if device == "nvme":
        with pytest.raises(ConfigError, match=r"--enable_ema .* can't lie on NVMe"):
            refuse_nvme(config)
    else:
        refuse_nvme(config)
    refuse_nvme({})
