"""What of the engine's benchmark runs without a device: its checks and its comparisons."""

from benchmarks.engine import SETTINGS, ratios, soak
from pipeline import SamplingParams
from pipeline.rollout import SamplingMask
from tests import engines, pipes


def test_settings_are_policies():
    assert [SamplingParams(**setting).keeps_supports for setting in SETTINGS.values()] == [False, True, True, True]


def test_the_soak_counts_every_mask():
    found = soak(engines.target(), engines.draft("dflash"), 1024)
    assert found == {"tokens": 1024, "requested": 512, "masks": 512, "misaligned": 0, "outside": 0, "unnormalised": 0}


def test_a_mask_in_another_place_is_found(monkeypatch):
    """Masks moved by a row: still as many, but with their tokens outside, or with other log-probabilities."""
    for name in ("__getitem__", "row_logprobs"):
        row = getattr(SamplingMask, name)
        monkeypatch.setattr(SamplingMask, name, lambda mask, i, row=row: row(mask, (i + 1) % len(mask)))
    found = soak(pipes.target(), None, 512)
    assert found["masks"] == 256
    assert found["outside"] > 100


def test_what_the_figures_are_held_against():
    arms = {
        f"{method}, off, batch 8": {"tokens_per_second": rates}
        for method, rates in {"ordinary": [90.0, 100.0, 400.0], "dflash": [250.0, 240.0, 1.0]}.items()
    }
    figures = {"arms": arms, "peers": {"generate, batch 8": [10.0]}, "masks_on_over_off": {"dflash": 0.99951}}
    assert ratios(figures, [8], ["off"], ["ordinary", "dflash"]).splitlines() == [
        "dflash over ordinary, off, batch 8: 2.40",
        "ordinary, off over generate, batch 8: 10.0",
        "masks on over off, dflash: 0.9995",
    ]
