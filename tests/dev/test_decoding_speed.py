"""The bench of decoding: all ways decode the same image, and its figures follow from the times."""

import pytest
from benchmark.decoding_speed import RATIOS, measure_decoding


def test_decoding_is_measured_and_its_error_known():
    found = measure_decoding(num_images=2, seconds=0.0, seed=0, sizes=((80, 60), (40, 70)))
    assert set(found) == set(RATIOS)
    for figures in found.values():
        assert figures["max_error"] <= 2
        for way in ("ours", "llava"):
            times_faster = figures["fast_per_s"] / figures[f"{way}_per_s"]
            assert figures[f"fast_over_{way}"] == pytest.approx(times_faster)
