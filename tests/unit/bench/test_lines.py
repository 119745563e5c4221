"""Curves with bands, as SVG text."""

import re

import pytest

from scripts.bench.lines import Curves, at, band, draw_lines


@pytest.mark.parametrize(("place", "value"), [(-1, 10), (0, 10), (1, 15), (2, 20), (3, 30), (9, 40)])
def test_a_run_has_values_between_its_points_and_its_ends_outside(place: float, value: float) -> None:
    assert at(([0, 2, 4], [10, 20, 40]), place) == value


def test_a_band_goes_as_far_as_the_shortest_run() -> None:
    found = band([([0, 10], [0, 10]), ([1, 6], [3, 3]), ([0, 8], [4, 4])])
    assert (found[0][0], found[-1][0]) == (1, 6)
    assert found[0][1:] == (1, 3, 4)
    assert found[-1][1:] == (3, 4, 6)
    assert all(low <= middle <= high for _, low, middle, high in found)


def test_a_plot_has_a_line_for_each_series_and_a_band_for_several_runs() -> None:
    series = {"sync": [([0, 1], [0.1, 0.3]), ([0, 1], [0.2, 0.4])], "a < b": [([0, 2], [0.0, 0.9])]}
    text = draw_lines("curves", [[Curves("reward", "s", series)]])
    assert text.count("<polyline") == 2 and text.count("<polygon") == 1
    assert "a &lt; b" in text
    points = re.findall(r'<polyline points="([^"]*)"', text)[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert heights == sorted(heights, reverse=True)  # upwards on the page
