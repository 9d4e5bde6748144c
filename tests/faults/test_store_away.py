"""A store that often fails, and one that is gone for a while."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from faults.places import Place, assert_nothing_left, make_place
from faults.places import history as history_of
from parts.proxy import REFUSE, SOUND, Proxy


@pytest.fixture
def bucket(tmp_path: Path, s3_location: str, s3_proxy: Proxy) -> Place:
    """A place whose store lies behind a proxy that the test tells what to do."""
    return make_place(tmp_path, s3_location, AWS_ENDPOINT_URL=s3_proxy.url)


def test_every_fifth_request_fails(bucket: Place, s3_proxy: Proxy, uninterrupted: Place) -> None:
    numbers = itertools.count()
    bucket.detach()
    s3_proxy.trouble = lambda *_: REFUSE if next(numbers) % 5 == 0 else SOUND
    assert bucket.wait_for_result() == "finished"
    s3_proxy.trouble = lambda *_: SOUND
    assert history_of(bucket.run()) == history_of(uninterrupted.run())
    assert_nothing_left(bucket)
    bucket.close()


def test_it_is_gone_for_longer_than_a_lease_lasts(bucket: Place, s3_proxy: Proxy, uninterrupted: Place) -> None:
    bucket.detach()
    bucket.wait_for_commit()
    s3_proxy.trouble = lambda *_: REFUSE
    time.sleep(20)
    s3_proxy.trouble = lambda *_: SOUND
    assert bucket.wait_for_result() == "finished"
    assert history_of(bucket.run()) == history_of(uninterrupted.run())
    assert not any(event.kind == "failed" for event in bucket.run().events().read())
    assert_nothing_left(bucket)
    bucket.close()
