"""The cells of the table of what leaves the baseline's band, and the notes that explain them."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tim.diagnosis.early_warning import BandRule, Departure
from verl_tim.diagnosis.formats import listed, short

NOTHING = "–"
STAYED, TOO_SHORT = "stayed", "too short"


def left(departure: Departure) -> str:
    """The step, or why there is none."""
    return str(departure.step) if departure.step is not None else departure.state


def band_cells(departure: Departure) -> tuple[str, str]:
    """Value and band where it left."""
    if departure.step is None or departure.band is None:
        return NOTHING, NOTHING
    value = "not finite" if departure.value is None else short(departure.value)
    low, high = departure.band
    return value, short(low) if departure.sharp else f"{short(low)} … {short(high)}"


def changed(departure: Departure) -> str:
    """For a band without width, when the run leaves its own first steps."""
    if not departure.sharp:
        return NOTHING
    if departure.changed is not None:
        return str(departure.changed)
    return STAYED if departure.settled else TOO_SHORT


def band_notes(departures: Sequence[Departure], rule: BandRule) -> list[str]:
    """What the cells mean that are no numbers, of those that occur."""
    notes = []
    if any(d.state in ("left", STAYED) for d in departures):
        notes.append(
            f"leaves at step: the first of {rule.consecutive} logged steps in a row at which the signal is outside the "
            f"baseline's band ({STAYED}: there are none); value and band are those of that step."
        )
    if any(d.sharp for d in departures):
        notes.append(
            "changes at step: where the baseline is constant any mismatch leaves its band at once, and this is the "
            f"step at which the run leaves the band of its own first {rule.window} steps ({STAYED}: it does not)."
        )
    if any(d.state == TOO_SHORT for d in departures):
        notes.append(
            f"leaves at step, {TOO_SHORT}: it takes {rule.steps_to_leave} steps that the run and all runs of the "
            "baseline logged."
        )
    short_ones = {d.run: d.steps for d in departures if changed(d) == TOO_SHORT}
    if short_ones:
        have = listed([f"{run} has {steps}" for run, steps in short_ones.items()])
        notes.append(
            f"changes at step, {TOO_SHORT}: it takes {rule.steps_to_change} logged steps to tell (--band-window and "
            f"--band-steps together); {have}."
        )
    if any(d.state == "not logged" for d in departures):
        notes.append("not logged: by the run or by the baseline.")
    if any(NOTHING in (changed(d), *band_cells(d)) for d in departures):
        notes.append(
            f"{NOTHING}: nothing to tell; value and band where no signal leaves, changes at step where the baseline is "
            "not constant."
        )
    return notes
