"""How a run went after each change of a stream whose shift comes and goes."""

from itertools import groupby

import numpy as np

from ttvd.bench.packed import has_batches
from ttvd.bench.spec import Run

FIRST = 128
"""Images after a change within which a method should have met it."""
SHIFTED, SHIFTED_LATER = "shifted, first", "shifted, afterwards"
BACK, BACK_LATER = "clean again, first", "clean again, afterwards"
RARE, USUAL = "rare", "usual"


def errors_by_part(run: Run) -> dict[str, float]:
    """Return the error in each part of an onset, a recurring or a rare stream.

    It is empty for other streams, and where single batches are not known.

    - Of an onset these are the first ``FIRST`` images after each change, and those that follow. A batch belongs to the
      first images if it begins within them. The images before the first change are in no part. A fresh start has the
      two parts of the shift.
    - Of a recurring stream these are its rounds, ``"1"``, ``"2"`` and so on.
    - Of a rare stream these are the batches of the two domains.
    """
    if not has_batches(run):
        return {}
    names = np.array(_name_batches(run), dtype=object)
    sizes, wrong = run.record.sizes().numpy(), run.record.wrong().numpy()
    parts = dict.fromkeys(name for name in names if name)
    return {name: float(wrong[names == name].sum() / sizes[names == name].sum()) for name in parts}


def _name_batches(run: Run) -> list[str]:
    """Return the part of each batch; empty for a batch that belongs to none."""
    spec, domains = run.spec, run.record.domains()
    if spec.join == "rare":
        return [RARE if domain else USUAL for domain in domains]
    visits = [len(list(group)) for _, group in groupby(domains)]
    if spec.join == "recurring":
        return [
            str(number // len(spec.domains) + 1) for number, count in enumerate(visits) for _ in range(count)
        ]
    if spec.join != "onset":
        return [""] * len(domains)
    names: list[str] = []
    for count in visits:
        early, later = (SHIFTED, SHIFTED_LATER) if domains[len(names)] else (BACK, BACK_LATER)
        if not names and not domains[0]:
            early = later = ""
        sizes = run.record.sizes()[len(names) : len(names) + count]
        names += [early if begin < FIRST else later for begin in (sizes.cumsum(0) - sizes).tolist()]
    return names
