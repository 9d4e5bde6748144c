"""From what a person writes (`./store`, `file:///data`, `s3://bucket/prefix`) to a store."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packtrain.errors import Mistake
from packtrain.store.base import Store, is_key
from packtrain.store.directory import DirectoryStore

if TYPE_CHECKING:
    from packtrain.store.bucket import Server

METADATA_SECONDS = 1.0
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
# Set on EKS, ECS and wherever else a machine has an identity of its own; obstore uses them by itself.
_IDENTITIES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def open_store(location: str, *, outage_seconds: float = 60.0, answer_seconds: float = 15.0) -> Store:
    """Nothing is made or asked of the store yet.

    A bucket whose server fails, or says nothing for `answer_seconds`, is tried again for `outage_seconds`.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return _open_directory(location)
    # Refused without repeating it: it may hold a secret.
    if "@" in rest.split("/")[0] or "?" in rest:
        raise Mistake("a store's address holds no keys: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    if scheme == "file":
        return _open_directory(_path_of(location))
    if scheme == "s3":
        return _open_bucket(rest, outage_seconds, answer_seconds)
    raise Mistake(
        f"{location!r}: a store is a directory or s3://bucket/prefix, not {scheme}:// "
        "(other servers that speak S3: set AWS_ENDPOINT_URL)"
    )


def _path_of(location: str) -> str:
    url = urlsplit(location)
    if url.netloc not in ("", "localhost"):
        raise Mistake(f"{location!r} names a host: write file:///path with three slashes, or the path alone")
    return unquote(url.path)


def _open_directory(path: str) -> Store:
    if not path.strip() or "\0" in path:
        raise Mistake("the store has no name: give a directory or s3://bucket/prefix")
    root = Path(path).expanduser()
    if root.exists() and not root.is_dir():
        raise Mistake(f"{root} is a file: a store is a directory; choose another name")
    return DirectoryStore(root)


def _open_bucket(rest: str, outage_seconds: float, answer_seconds: float) -> Store:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if not _BUCKET.fullmatch(bucket):
        raise Mistake(f"{bucket!r} cannot be a bucket's name: write s3://bucket or s3://bucket/prefix")
    if prefix and not is_key(prefix):
        raise Mistake(f"{prefix!r} cannot be a prefix: names separated by single slashes, without '.' and '..'")
    server = server_from(os.environ)
    if server.access_key is None:
        _check_identity(os.environ, server)

    from packtrain.store.bucket import BucketStore, Patience

    return BucketStore(bucket, prefix, server, Patience(answer_seconds, outage_seconds))


def server_from(environment: Mapping[str, str]) -> Server:
    from packtrain.store.bucket import Server

    def first(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    access_key, secret_key = first("AWS_ACCESS_KEY_ID"), first("AWS_SECRET_ACCESS_KEY")
    if (access_key is None) != (secret_key is None):
        missing = "AWS_SECRET_ACCESS_KEY" if access_key else "AWS_ACCESS_KEY_ID"
        raise Mistake(f"half of the keys is missing: set {missing} too")
    endpoint = first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if endpoint is not None:
        _check_endpoint(endpoint)
    return Server(
        region=first("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1",
        endpoint=endpoint,
        access_key=access_key,
        secret_key=secret_key,
        session_token=first("AWS_SESSION_TOKEN"),
    )


def _check_endpoint(endpoint: str) -> None:
    try:
        url = urlsplit(endpoint)
        sound = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        sound = False
    if not sound or "@" in endpoint or "?" in endpoint:
        raise Mistake("AWS_ENDPOINT_URL must be http://host:port or https://host, without keys in it")


def _check_identity(environment: Mapping[str, str], server: Server) -> None:
    """Without keys, the machine may still have a role of its own.

    obstore would ask the metadata service of EC2 for minutes where there is none: so only for Amazon's
    own S3, and its door is tried first.
    """
    if any(environment.get(name) for name in _IDENTITIES):
        return
    host = urlsplit(server.endpoint or "https://s3.amazonaws.com").hostname or ""
    disabled = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) and not disabled:
        metadata = environment.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254"
        if _is_reachable(metadata, METADATA_SECONDS):
            return
    raise Mistake(
        "no keys for the store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
        "(`aws configure export-credentials --format env` prints those of the aws command)"
    )


def _is_reachable(address: str, seconds: float) -> bool:
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname or "", url.port or 80), seconds).close()
    except OSError:
        return False
    return True
