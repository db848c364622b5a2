import pytest

from verl_tim.units import count, size


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (9_600, "9.38 KiB"),
        (312_200 * 4, "1.19 MiB"),
        (200 << 20, "200 MiB"),
        (139.81 * (1 << 30), "139.8 GiB"),
        (1023.6, "1 KiB"),
        (1023.96 * (1 << 20), "1 GiB"),
        (1023.4 * (1 << 20), "1023 MiB"),
        (27.36 * (1 << 30), "27.4 GiB"),
        (5000 << 30, "4.88 TiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_size(nbytes, shown):
    assert size(nbytes) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (950, "950"),
        (2_000, "2.0 K"),
        (156_100, "156 K"),
        (612_480, "612 K"),
        (999_499, "999 K"),
        (999_999, "1.0 M"),
        (-999_999, "-1.0 M"),
        (25.4e6, "25.4 M"),
        (99.94e6, "99.9 M"),
        (99.96e6, "100 M"),
        (999.4e6, "999 M"),
        (999.6e6, "1.0 B"),
        (999.96e6, "1.0 B"),
        (1.72e9, "1.7 B"),
        (30_500_000, "30.5 M"),
        (30.5e9, "30.5 B"),
        (5e15, "5,000 T"),
    ],
)
def test_count(number, shown):
    assert count(number) == shown
