import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tim.launch.errors import LaunchError
from verl_tim.planning.lengths import Lengths, lengths


@given(st.integers(64, 40_000), st.floats(0.01, 0.99))
def test_mean_and_range_are_as_asked(longest, share):
    found = Lengths(share * longest, longest).quantiles(4096)
    assert found.mean() == pytest.approx(share * longest, rel=0.02, abs=1.0)
    assert (np.diff(found) >= 0).all()
    assert found.min() >= 1
    assert found.max() <= longest


def test_half_is_uniform_and_its_square_is_a_third():
    assert Lengths(500.0, 1000).mean_square == pytest.approx(1e6 / 3, rel=1e-3)


def test_default_is_half_and_impossible_means_are_refused():
    assert lengths(100, None, "--mean-response").mean == 50
    for mean in (0.0, 100.0, 250.0):
        with pytest.raises(LaunchError, match="--mean-response"):
            lengths(100, mean, "--mean-response")
