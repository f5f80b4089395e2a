"""Words that the pages explain: metrics and rules of selection."""

METRICS = (
    ("error", "Share of the images that are classified wrongly, over the whole stream. Lower is better."),
    (
        "ECE",
        "Expected calibration error over the whole stream, 15 bins: how far confidence and accuracy are apart. A "
        "method that says 80 % and is right in 80 % of these cases has an ECE of zero.",
    ),
    (
        "batch ECE",
        "The mean of the ECEs of single batches, as some papers report it. It is too high for small batches, even for "
        "a perfectly calibrated method: use it to compare with those papers and for nothing else.",
    ),
    ("NLL", "Mean negative log-probability of the true class, in nats."),
    ("Brier", "Squared distance between the probabilities and the truth, summed over classes; from 0 to 2."),
    (
        "ms per image",
        "Median time of a batch divided by its size: prediction and adaptation, the device included.",
    ),
    ("kept", "Share of the images that took part in gradient steps; methods without steps have none."),
    (
        "±",
        "Standard deviation over seeds. A seed decides the order of the stream and the random parts of the method; the "
        "source model and the corrupted images stay the same, so the spread says nothing of other models or images.",
    ),
    (
        "†",
        "Some runs are missing: the number is the mean of the seeds that have all runs, and is never marked as best.",
    ),
)

RULES = {
    "last": "One fixed setting, the adapter used as it is. No labels are needed: this can be deployed.",
    "validation": "The setting of the grid with the lowest mean error on corruptions that are held out for this and "
    "not reported. No labels of the reported data are used: this can be deployed.",
    "grid-best": "The setting of the grid with the lowest mean error on the very data that is reported, as many papers "
    "do it. It has seen the test labels, so it flatters, most of all large grids.",
    "oracle": "Several steps on each batch, of which the labels of the batch choose the best, as TTAB defines it; "
    "where there is a grid, the test labels choose its setting too. It shows what labels could gain on a batch, is "
    "never a result and cannot be the best of a column. It may start afresh at each batch and use fewer images than "
    "the other lines, and then it is no bound for them.",
}
