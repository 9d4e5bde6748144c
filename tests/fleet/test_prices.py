from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from packtrain.fleet import prices
from packtrain.fleet.prices import PriceList, as_text, aws_prices, list_price, price_lists, updated
from packtrain.job.job import FleetSettings, Job
from parts.rental import register
from parts.s3 import leave_aws


def test_every_list_has_a_date_and_a_source() -> None:
    for one in price_lists():
        assert date(2020, 1, 1) < date.fromisoformat(one.date) <= date.today()
        assert one.source.startswith("https://")
        assert one.dollars_per_hour


def test_no_price_is_listed_twice() -> None:
    listed = [
        (one.provider, machine, place)
        for one in price_lists()
        for machine, prices in one.dollars_per_hour.items()
        for place in prices
    ]
    assert len(listed) == len(set(listed))


def test_a_price_depends_on_the_region_and_an_unknown_one_is_not_guessed() -> None:
    assert list_price("aws", "us-east-1", "g5.xlarge") == 1.006
    assert list_price("aws", "eu-west-1", "g5.xlarge") == 1.123
    assert list_price("aws", "moon-north-1", "g5.xlarge") is None
    assert list_price("aws", "us-east-1", "g99.xlarge") is None
    assert list_price("rental", "us-east-1", "g5.xlarge") is None


# The file.


def test_the_file_is_what_its_program_writes() -> None:
    file = Path(prices.__file__).with_suffix(".json")
    assert as_text(price_lists()) == file.read_text()


def product(machine: str, dollars: str, unit: str = "Hrs") -> str:
    """Return a product as AWS's price list has it, in text."""
    dimension = {
        "unit": unit,
        "pricePerUnit": {"USD": dollars},
        "description": f"${dollars} per On Demand Linux {machine}",
    }
    term = {"offerTermCode": "JRTCKXETXF", "priceDimensions": {"ABC.JRTCKXETXF.6YS6EN2CT7": dimension}}
    attributes = {"instanceType": machine, "regionCode": "us-east-1", "operatingSystem": "Linux"}
    return json.dumps({"product": {"attributes": attributes}, "terms": {"OnDemand": {"ABC.JRTCKXETXF": term}}})


def test_prices_are_read_from_the_provider_s_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_aws(monkeypatch)
    client = boto3.client("pricing", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    pages = [
        [product("g5.xlarge", "1.0060000000"), product("p9.xlarge", "0.0000000000")],
        [product("m5.large", "0.096")],
    ]
    with Stubber(client) as stub:  # checks requests and answers against the service's own description
        for number, page in enumerate(pages):
            token = {"NextToken": "more"} if number == 0 else {}
            stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": page, **token})
        assert aws_prices(client, "us-east-1") == {"g5.xlarge": 1.006, "m5.large": 0.096}
        stub.assert_no_pending_responses()


def test_an_update_keeps_what_is_no_longer_sold_with_its_date() -> None:
    old = PriceList(
        provider="aws",
        date="2025-01-01",
        source="https://a",
        dollars_per_hour={"p3": {"x": 3.0}, "g5": {"x": 2.0, "y": 2.5}},
    )
    other = PriceList(provider="other", date="2024-01-01", source="https://b", dollars_per_hour={"g5": {"x": 9.0}})
    fresh, *kept = updated([old, other], {"x": {"g5": 1.0, "new": 5.0}}, "2026-01-01")
    assert (fresh.date, fresh.dollars_per_hour) == ("2026-01-01", {"g5": {"x": 1.0}})
    assert [(one.date, one.dollars_per_hour) for one in kept] == [
        ("2025-01-01", {"p3": {"x": 3.0}, "g5": {"y": 2.5}}),
        ("2024-01-01", {"g5": {"x": 9.0}}),
    ]


# Prices of a job.


def rented(*types: str, **fields: float) -> FleetSettings:
    return FleetSettings.model_validate({"rental": {"account": "/account", "types": types}, **fields})


def test_the_dearest_machine_that_may_be_rented_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    assert rented("small").dollars_per_hour == 0.5
    assert rented("small", "large").dollars_per_hour == 2.0
    assert rented("small", "large", price=0.3).dollars_per_hour == 0.3
    assert rented("small", "odd").dollars_per_hour is None
    assert rented("small", "odd", price=0.3).dollars_per_hour == 0.3


def test_a_budget_in_dollars_asks_for_a_price_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    job = {"name": "a", "program": ["train.py"], "budget": {"dollars": 1}}
    with pytest.raises(ValueError, match=r"requires fleet\.price, .*; no price is known for odd in /account"):
        Job.model_validate({**job, "fleet": rented("small", "odd").model_dump(mode="json")})
    assert Job.model_validate({**job, "fleet": rented("small").model_dump(mode="json")}).budget.dollars == 1
