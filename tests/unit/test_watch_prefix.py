"""examples/watch_prefix.py: what a second prefix must not replace."""

from __future__ import annotations

from examples.watch_prefix import slug

PREFIXES = (
    *("s3://data/", "s3://data/ä/", "s3://data/日本/"),
    *("s3://data/in/", "s3://data/In/", "s3://data/in_1/", "s3://data/in-1/", "s3://data/in/1/"),
)


def test_each_prefix_has_a_schedule_and_an_automation_of_its_own() -> None:
    """Keys of S3 differ in case, in punctuation and in letters of every script."""
    assert len({slug(each) for each in PREFIXES}) == len(PREFIXES)
    assert slug("s3://data/In 1/").startswith("new-files-of-s3-data-in-1-")
