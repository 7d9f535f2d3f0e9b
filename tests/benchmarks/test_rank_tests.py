"""The tests of differences, on groups whose divisions can be counted by hand."""

import numpy as np
import pytest
from rank_tests import decisions_of, mid_ranks, p_value


def test_equal_values_share_the_mean_of_their_ranks_and_missed_runs_the_last():
    assert mid_ranks([5.0, 1.0, 5.0, np.inf, np.inf, 2.0]).tolist() == [3.5, 1.0, 3.5, 5.5, 5.5, 2.0]


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ([1, 2], [3, 4], 2 / 6),
        ([3, 4], [1, 2], 2 / 6),
        ([1, 4], [2, 3], 1.0),
        ([1, 2, 3], [4, 5, 6, np.inf], 2 / 35),
        ([1, 1, 1], [1, 1], 1.0),
    ],
)
def test_p_is_the_share_of_divisions_that_differ_by_as_much_in_either_direction(first, second, share):
    assert p_value(np.array(first, float), np.array(second, float)) == pytest.approx(share, abs=0.01)


def test_decisions_of_a_table_of_runs_are_infinite_where_the_score_was_missed(tmp_path):
    (tmp_path / "runs.csv").write_text('name,seed,solved,decisions\n"a, b",0,1,500\nother,0,1,1\n"a, b",1,0,900\n')
    assert decisions_of(tmp_path, "runs.csv:a, b", 18.0, 100).tolist() == [500.0, np.inf]
