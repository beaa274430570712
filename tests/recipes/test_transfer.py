"""The fit of what is best over the tokens read finds the law that losses were made by."""

import math
import runpy
from types import SimpleNamespace

import pytest

from tests.recipes.programs import RECIPES

transfer = SimpleNamespace(**runpy.run_path(str(RECIPES / "benchmarks" / "transfer.py")))


def losses(rates, batches, half_lives, all_tokens=(250_000, 500_000, 1_000_000, 2_000_000)):
    """Losses that are lowest at a rate, a batch and a half-life that are powers of the tokens."""
    for tokens in all_tokens:
        lows = {"rate": 0.006 * (tokens / 1e6) ** -0.3, "batch": 1000 * (tokens / 1e6) ** 0.5, "half_life": 1 / 12}
        for rate in rates:
            for batch in batches:
                for share in half_lives:
                    at = {"rate": rate, "batch": batch, "half_life": 1 / int(share[2:])}
                    beside = sum(math.log(at[name] / low) ** 2 for name, low in lows.items())
                    yield {**at, "half_life": share, "tokens": tokens, "loss": 5 + beside}


def test_the_fit_finds_the_powers_that_the_losses_were_made_by():
    rates, batches, half_lives = (
        (0.001, 0.002, 0.004, 0.008, 0.016),
        (250, 500, 1000, 2000, 4000),
        ("1/4", "1/16", "1/64"),
    )
    best = transfer.fit([*losses(rates, batches, half_lives)])
    for name, start, slope in (("rate", 0.006, -0.3), ("batch", 1000, 0.5), ("half_life", 1 / 12, 0)):
        assert transfer.power(best, name) == pytest.approx((start, slope), abs=1e-9)
    said = transfer.fit_table(best)
    assert "rate: 0.006 x (tokens / 1,000,000)^-0.30" in said and "(at the edge)" not in said


def test_what_lies_at_the_edge_of_the_grid_decides_no_power(tmp_path):
    best = transfer.fit([*losses((0.02, 0.04, 0.08), (500, 1000, 2000), ("1/8", "1/16"))])
    assert [each.rate for each in best] == [(0.02, False)] * 4
    assert transfer.power(best, "rate") is None and transfer.power(best, "half_life") is None
    assert "0.02 (at the edge)" in transfer.fit_table(best) and "rate: too few points" in transfer.fit_table(best)
    transfer.draw(best, tmp_path / "fit.svg")
    assert b"<svg" in (tmp_path / "fit.svg").read_bytes()
