"""The one door to everything a run keeps: a directory (local, NFS) or a bucket of any server that speaks S3.

`open_store("./store")` and `open_store("s3://bucket/prefix")` behave the same. Keys are names separated by `/`. An
object appears whole or not at all, and `put_if_absent` has exactly one winner.
"""

from __future__ import annotations

from packtrain.store.base import Entry, Store, is_key
from packtrain.store.errors import ObjectNotFound, StoreError
from packtrain.store.location import open_store

__all__ = ["Entry", "ObjectNotFound", "Store", "StoreError", "is_key", "open_store"]
