"""loss.png: every text of it is whole, and numbers are plain."""

import math

import numpy as np
import pytest

from llava_ds.tracking.plots import loss_figure


@pytest.mark.parametrize(
    ("high", "low", "is_log"),
    [(3.0, 2.5, False), (1.4, 0.4, False), (5.0, 0.02, True), (12.0, 1e-4, True), (60_000.0, 900.0, True),
     (math.nan, math.nan, False)],
)  # fmt: skip
def test_all_texts_lie_within_the_figure_and_numbers_are_plain(high, low, is_log):
    steps, losses = np.arange(1, 101), np.geomspace(high, low, 100)
    figure = loss_figure(steps, losses, np.linspace(2e-3, 1e-9, 100), "a run: 100 steps, ZeRO-3")
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    renderer = figure.canvas.get_renderer()
    loss, rate = figure.axes
    assert loss.get_ylabel() == "loss per supervised token" + " (log scale)" * is_log
    assert (loss.get_yscale(), rate.get_ylabel()) == ("log" if is_log else "linear", "learning rate")
    for axis in (loss.xaxis, loss.yaxis, rate.yaxis):
        first, last = axis.get_view_interval()
        ticks = [tick.label1 if tick.label1.get_visible() else tick.label2 for tick in axis.get_major_ticks()
                 if first <= tick.get_loc() <= last]  # fmt: skip
        assert len(ticks) >= 2
        for text in (axis.label, *ticks):
            box = text.get_window_extent(renderer)
            assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text.get_text()
            assert text.get_text() and "$" not in text.get_text()
