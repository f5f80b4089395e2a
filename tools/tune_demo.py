"""Choose the demo's learning rates on corruptions that the demo does not show.

    python tools/tune_demo.py [--checkpoints DIR] [--limit N]

It prints the mean error over three corruptions that the demo does not show, for every setting. The demo uses the
learning rate with the lowest error of each method, with all other parameters at their defaults. The digits and labels
are those of the demo: only the corruptions are held out.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from ttvd.demo.job import Domain, Entry, measure

DOMAINS = (Domain("speckle_noise", 5), Domain("gaussian_blur", 2), Domain("spatter", 5))


def settings() -> Iterator[Entry]:
    yield Entry("bn", "bn", "digits-plain")
    yield Entry("SLA + bn", "bn", "digits-sla", views=4)
    for lr in (1e-2, 3e-2, 1e-1):
        yield Entry(f"tent lr={lr:g}", "tent", "digits-plain", parameters={"lr": lr})
        yield Entry(f"SLA + tent lr={lr:g}", "tent", "digits-sla", 4, {"lr": lr})
    for lr in (1e-2, 3e-2, 1e-1, 3e-1):
        for name in ("vd", "civd", "cipd", "ttvd-reference"):
            yield Entry(f"{name} lr={lr:g}", name, "digits-sla", parameters={"lr": lr})
    for lr in (2e-2, 5e-2, 1e-1, 2e-1):  # without momentum
        yield Entry(f"ttvd lr={lr:g}", "ttvd", "digits-sla", parameters={"lr": lr})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of the checkpoints; the package's own unless given"
    )
    parser.add_argument("--limit", type=int, default=2000, help="images of the stream to use")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    entries = sorted(settings(), key=lambda entry: entry.label)
    for entry in entries:
        results = measure([entry], DOMAINS, folder=chosen.checkpoints, limit=chosen.limit)
        totals = [record.metrics().compute() for record in results.of(entry.label)]
        errors = [100 * total["error"] for total in totals]
        ece = sum(100 * total["ece"] for total in totals) / len(totals)
        columns = "  ".join(f"{error:5.1f}" for error in errors)
        print(
            f"{entry.label:32} {columns}   mean {sum(errors) / len(errors):5.2f}   ECE {ece:5.1f}", flush=True
        )


if __name__ == "__main__":
    main()
