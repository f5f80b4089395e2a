"""Statistics as text: on the command line, in recipes and in records."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttvd.bench.job import _from_plain, to_plain
from ttvd.nn.norms import Statistics

ALL = ["batch", "source", "prior:0.2", "count:16", "momentum:0.1", "track:64:1024", "track:0:inf"]


FLAGS = ["", ":renorm", ":anchored", ":renorm:anchored"]


@pytest.mark.parametrize("text", [text + flags for text in ALL for flags in FLAGS])
def test_recipes_hold_every_policy(text: str) -> None:
    statistics = Statistics.parse(text)
    assert str(statistics) == text
    assert statistics.renorm == ("renorm" in text)
    assert statistics.anchored == text.endswith("anchored")
    plain = json.loads(json.dumps(to_plain(statistics), allow_nan=False))
    assert _from_plain("statistics", plain) == statistics
    assert _from_plain("statistics", text) == statistics


@given(
    number=st.floats(0.0, 1.0, exclude_min=True),
    count=st.floats(0.0, 1e9),
    more=st.floats(0.0),
    renorm=st.booleans(),
    anchored=st.booleans(),
)
def test_text_keeps_every_digit(
    number: float, count: float, more: float, renorm: bool, anchored: bool
) -> None:
    for statistics in (
        Statistics(prior=number, renorm=renorm, anchored=anchored),
        Statistics(momentum=number, renorm=renorm, anchored=anchored),
        Statistics(count=count, renorm=renorm, anchored=anchored),
        Statistics(count=count, memory=count + more, renorm=renorm, anchored=anchored),
    ):
        assert Statistics.parse(str(statistics)) == statistics


def test_old_records_keep_their_hash() -> None:
    assert to_plain(Statistics(count=16.0)) == {"prior": 0.0, "count": 16.0, "momentum": None}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "track",
            "track:64",
            "track:64:many",
            "track:1:2:3",
            "batch:1",
            "renorm",
            "prior:renorm",
            "count:1:",
        ),
        *(
            "anchored",
            "count:anchored",
            "batch:anchored:renorm",
            "batch:anchored:anchored",
            "batch:anchored:",
        ),
    ],
)
def test_texts_that_name_no_statistics(text: str) -> None:
    with pytest.raises(ValueError, match="track:COUNT:MEMORY"):
        Statistics.parse(text)


@pytest.mark.parametrize(
    "text", ["track:64:16", "track:nan:16", "track:1:nan", "track:inf:inf", "track:-1:16"]
)
def test_impossible_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"count|memory"):
        Statistics.parse(text)
    with pytest.raises(ValueError, match="memory"):
        Statistics(memory=16.0)
    with pytest.raises(ValueError, match="not both"):
        Statistics(count=1.0, memory=16.0, momentum=0.1)
