"""The measurement of step planning runs: ranks of a machine share the order that the first one made."""

import pytest
from measured.step_planning import measure_planning


@pytest.mark.long
def test_other_ranks_map_the_order_that_the_first_one_made():
    found = measure_planning(1_000_000, 512, 4, 8192, "modality")
    assert found["mapped bytes per sample, once per machine"] < 16.1 and found["private MB, other ranks"] < 5
