"""List prices of machines that can be rented: dollars per hour, each list with its date and source, in prices.json.

Prices change, and a contract may say otherwise: `fleet.price` of a job comes first. A price that is not in the file is
not known, and never guessed. `python -m packtrain.fleet.prices` reads the types and regions of the file from AWS's own
price list, and prints the file with what it found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Dollars = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PricesByPlace = dict[str, dict[str, float]]
_PRICE_LIST = "https://api.pricing.us-east-1.amazonaws.com, AmazonEC2: Linux on demand, shared tenancy"
# What tells the price of a plain Linux machine from those with licenses, reservations or hardware of its own.
_PLAIN = {
    "operatingSystem": "Linux",
    "preInstalledSw": "NA",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


class PriceList(BaseModel):
    """Prices of a provider as they were on a date: by type of machine, then by region.

    `source` is where a reader can look them up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    source: str
    dollars_per_hour: dict[str, dict[str, Dollars]]


@cache
def price_lists() -> tuple[PriceList, ...]:
    data = files(__package__).joinpath("prices.json").read_bytes()
    return TypeAdapter(tuple[PriceList, ...]).validate_json(data)


def list_price(provider: str, place: str, machine: str) -> float | None:
    """Return the dollars per hour of a type of machine in a region; None if the price is not known."""
    lists = (prices.dollars_per_hour for prices in price_lists() if prices.provider == provider)
    prices = (types.get(machine, {}).get(place) for types in lists)
    return next((price for price in prices if price is not None), None)


# The file.


def aws_prices(client: Any, region: str) -> dict[str, float]:
    """Ask AWS's price list, with a client of boto3 for `pricing`, for every type of machine in a region."""
    filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in _PLAIN.items()]
    filters.append({"Type": "TERM_MATCH", "Field": "regionCode", "Value": region})
    prices: dict[str, float] = {}
    for page in client.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters):
        for product in map(json.loads, page["PriceList"]):
            for term in product["terms"].get("OnDemand", {}).values():
                for dimension in term["priceDimensions"].values():
                    dollars = float(dimension["pricePerUnit"].get("USD", 0))
                    if dimension["unit"] == "Hrs" and dollars > 0:
                        prices[product["product"]["attributes"]["instanceType"]] = dollars
    return prices


def updated(lists: Iterable[PriceList], current: Mapping[str, Mapping[str, float]], date: str) -> list[PriceList]:
    """Return the lists with today's prices by region; what is no longer sold keeps its old price and date."""
    fresh: PricesByPlace = {}
    unchanged: list[PriceList] = []
    for prices in lists:
        remaining: PricesByPlace = {}
        for machine, places in prices.dollars_per_hour.items():
            for place, dollars in places.items():
                today = current.get(place, {}).get(machine) if prices.provider == "aws" else None
                into = remaining if today is None else fresh
                into.setdefault(machine, {})[place] = dollars if today is None else today
        if remaining:
            unchanged.append(prices.model_copy(update={"dollars_per_hour": remaining}))
    if not fresh:
        return unchanged
    return [PriceList(provider="aws", date=date, source=_PRICE_LIST, dollars_per_hour=fresh), *unchanged]


def as_text(lists: Iterable[PriceList]) -> str:
    """Return the text of the file, with a line for each type of machine."""
    texts = []
    for prices in lists:
        head = [f'  "{key}": {json.dumps(getattr(prices, key))},' for key in ("provider", "date", "source")]
        lines = [f'   "{machine}": {json.dumps(places)}' for machine, places in prices.dollars_per_hour.items()]
        texts.append("\n".join([" {", *head, '  "dollars_per_hour": {', ",\n".join(lines), "  }", " }"]))
    return "[\n" + ",\n".join(texts) + "\n]\n"


def main() -> None:
    import boto3

    places = {place for prices in price_lists() for types in prices.dollars_per_hour.values() for place in types}
    client = boto3.client("pricing", region_name="us-east-1")  # of all regions
    current = {place: aws_prices(client, place) for place in sorted(places)}
    sys.stdout.write(as_text(updated(price_lists(), current, datetime.now(UTC).date().isoformat())))


if __name__ == "__main__":
    main()
