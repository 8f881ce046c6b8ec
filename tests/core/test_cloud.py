"""Names of regions and zones: known ones pass; unknown ones are refused with the nearest or with all."""

import pytest
from refusals import refuses

from dovetail.core.chips import CHIPS
from dovetail.core.cloud import ELSEWHERE, REGIONS, check_place, check_region, check_zone, per_gb, rate, region


def test_known_names():
    assert check_region("--region", "Europe-West4") == "europe-west4"
    assert check_zone("zone", "us-central2-b") == "us-central2-b" and region("us-central2-b") == "us-central2"
    assert check_zone("zone", "us-central1-ai1a") == "us-central1-ai1a"
    assert [check_place("--bucket", place) for place in ("US", "nam4", "asia-east1")] == ["us", "nam4", "asia-east1"]
    assert all(place in REGIONS for prices in ELSEWHERE.values() for place in prices)


@pytest.mark.parametrize(
    ("check", "given", "naming"),
    [
        (check_region, "mars", "Known: africa-south1, "),
        (check_region, "us-centrl1", "Did you mean 'us-central1'?"),
        (check_zone, "us-east9-b", "Did you mean 'us-east5'?"),
        (check_zone, "us-east5", "such as us-east5-a; got 'us-east5'"),
        (check_zone, "us-east5-", "'us-east5-'"),
        (
            check_place,
            "moon",
            "--bucket-region must be a region of Google Cloud, such as us-central1, or us",
        ),
    ],
)
def test_unknown_names_are_refused(check, given, naming):
    with refuses("--bucket-region", naming=naming):
        check("--bucket-region", given)


def test_a_region_without_a_listed_price_has_that_of_the_us_and_says_so():
    v4 = CHIPS["v4"]
    assert rate(v4, region="me-west1").dollars == v4.dollars
    assert "US (none is listed for me-west1)" in rate(v4, region="me-west1").says
    assert "Cloud, US, " in rate(v4, region="us-east5").says


def test_a_dual_region_lies_on_a_continent():
    assert per_gb("nam4", "us-east1-b") == 0 and per_gb("eur4", "us-east1-b") == 0.08
