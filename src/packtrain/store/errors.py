"""Errors of stores: turn a message of the system or the server into one line that a person can act on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from packtrain.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_NOT_FOUND, Mistake, NotFound, PacktrainError
from packtrain.system import is_in_cache, is_scratch


class StoreError(PacktrainError):
    """A store that refused or failed.

    `temporary`: the same call may succeed later, so a caller that can wait should. Anything else (wrong keys, no
    such bucket) has to be fixed by a person.
    """

    exit_code = EXIT_MISTAKE

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        if temporary:
            self.exit_code = EXIT_FAILED


class ObjectNotFound(StoreError, NotFound):
    exit_code = EXIT_NOT_FOUND


class StoreAway(StoreError):
    """A store that is not where it should be, such as a mount that is missing; `was_there` if it has been there."""

    def __init__(self, message: str, *, was_there: bool) -> None:
        super().__init__(message, temporary=True)
        self.was_there = was_there
        if not was_there:
            self.exit_code = EXIT_NOT_FOUND


class NoKeys(Mistake):
    """Nothing on this machine has keys for a bucket."""


class DamagedObject(StoreError):
    """An object that cannot be what its key says."""

    exit_code = EXIT_FAILED


# Errors of the system.

_FORBIDDEN = "permission denied; check owner and mode, or {elsewhere}"
_SYSTEM: Mapping[int, tuple[str, bool]] = {  # the message, and True if the error is temporary
    errno.ENOSPC: ("the disk is full; free some space or {elsewhere}", True),
    errno.EDQUOT: ("disk quota exceeded; free some space or ask for a larger quota", True),
    errno.EROFS: ("the file system is read-only; remount it for writing or {elsewhere}", False),
    errno.EACCES: (_FORBIDDEN, False),
    errno.EPERM: (_FORBIDDEN, False),
    errno.EIO: ("the disk or the network mount failed; see `dmesg`", True),
    errno.ESTALE: ("the network mount is stale; mount it again", True),
    errno.ENOTCONN: ("the network mount is disconnected; mount it again", True),
    errno.ETIMEDOUT: ("the network mount does not respond", True),
    errno.EHOSTDOWN: ("the network mount does not respond", True),
    errno.EMFILE: ("too many open files; raise `ulimit -n`", True),
    errno.ENFILE: ("too many open files on this machine", True),
    errno.ENAMETOOLONG: ("a name in this key is too long for the file system", False),
    errno.ENOTDIR: ("a part of the path is a file, not a directory; an object cannot have others below it", False),
    errno.EISDIR: ("is a directory; there are other objects below this key", False),
    errno.ENOENT: ("no such file or directory", False),
}


def explain_system(error: OSError, where: str) -> StoreError:
    """Explain the failure of a system call on the file or directory `where`."""
    number = error.errno or 0
    advice, temporary = _SYSTEM.get(number, (os.strerror(number) if number else str(error), False))
    elsewhere = "use another store"
    if is_in_cache(Path(where)) or is_scratch(Path(where)):
        elsewhere = f"set {'PACKTRAIN_CACHE' if is_in_cache(Path(where)) else 'TMPDIR'} to a directory on another disk"
    advice = advice.replace("{elsewhere}", elsewhere)
    return StoreError(f"{where}: {advice}", temporary=temporary)


@contextmanager
def explained(where: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError about `where`."""
    try:
        yield
    except OSError as error:
        raise explain_system(error, str(where)) from error


# Errors of a bucket's server, as obstore words them. {endpoint} and {keys} are named as the service names them.

_CODE = re.compile(r"<Code>\s*([A-Za-z]+)\s*</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_KEYS = re.compile(r"credential provider: StoreError: (.*)")  # obstore repeats the words of aws_keys.py
NOT_RENEWED = "cannot be renewed: AWS does not answer"
_CLOCK = "this machine's clock is wrong according to the server; set it (`timedatectl set-ntp true`), then try again"
_EXPIRED = "the session token is invalid or expired; renew the keys and AWS_SESSION_TOKEN, or log in to the profile"
_REGION = "the bucket is in another region; set AWS_REGION to it"
_DENIED = "access denied; check the keys and their permissions on this bucket"
_VARIABLES: Mapping[str, tuple[str, str]] = {  # by the scheme of the store's URL
    "s3": ("AWS_ENDPOINT_URL", "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_BASE_URL", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY"),
}
_BY_CODE: Mapping[str, str] = {
    "InvalidAccessKeyId": "unknown access key; check AWS_ACCESS_KEY_ID or AWS_PROFILE, and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "wrong secret key; check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "AccessDenied": _DENIED,
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "NoSuchBucket": "bucket not found; create it or correct its name",
    "InvalidBucketName": "invalid bucket name; correct it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "ContainerNotFound": "container not found; create it or correct its name",
    "AuthenticationFailed": "wrong account key or signature; check {keys}, and this machine's clock",
    "AuthorizationFailure": _DENIED,
    "AuthorizationPermissionMismatch": _DENIED,
    "InsufficientAccountPermissions": _DENIED,
    "QuotaExceeded": "bucket quota exceeded; delete something or ask for a larger quota",
}
_BY_STATUS: Mapping[int, str] = {
    301: _REGION,
    401: _DENIED,
    501: "the server does not know this request; use another server",
    403: "access denied; check the keys, their permissions on this bucket, and this machine's clock",
}
# NoSuchUpload: the upload was completed, but the answer got lost, so the client tried again: a new upload will work.
# InvalidBlockList: the same on Azure.
_TEMPORARY_CODES = {"RequestTimeout", "NoSuchUpload", "QuotaExceeded", "InvalidBlockList"}
_TEMPORARY_STATUSES = {408, 409, 429}
# Errors without an answer of the server, found by words in obstore's message, the more specific first.
_BY_WORDS: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (
        ("169.254.169.254", "InstanceCredentials", "metadata.google.internal"),
        "this machine's metadata service has no keys; attach an instance role, or set {keys}",
        True,
    ),
    (
        ("certificate",),
        "the server's certificate is not trusted; check {endpoint} and the system's root certificates",
        False,
    ),
    (("without LOCATION",), _REGION, False),
    (
        ("invalid path",),
        "contains an object whose name has an empty, '.' or '..' part; remove it or use a prefix of your own",
        False,
    ),
    (("dns error",), "cannot resolve the server's name; check {endpoint} and the network", True),
    (("kind: Connect",), "cannot connect to the server; check {endpoint} and the network", True),
    (
        ("HTTP error", "reqwest::Error", "HttpError", "timed out", "TimedOut"),
        "the connection broke or timed out; try again later",
        True,
    ),
)


def code_of(message: str) -> str:
    """Return S3's own name of the error, such as `NoSuchKey`; empty if the server gave none."""
    match = _CODE.search(message)
    return match[1] if match else ""


def status_of(message: str) -> int:
    match = _STATUS.search(message)
    return int(match[1]) if match else 0


def explain_server(message: str, where: str) -> StoreError:
    """Explain the failure of a request to a bucket, from obstore's message about it."""
    endpoint, keys = _VARIABLES.get(where.partition("://")[0], _VARIABLES["s3"])
    explanation = _explained_server(message, where)
    advice = str(explanation).replace("{endpoint}", endpoint).replace("{keys}", keys)
    return StoreError(advice, temporary=explanation.temporary)


def _explained_server(message: str, where: str) -> StoreError:
    if (refused := _NO_KEYS.search(message)) is not None:
        return StoreError(f"{where}: {refused[1]}", temporary=NOT_RENEWED in refused[1])
    code, status = code_of(message), status_of(message)
    # An answer of the service that hands out tokens says nothing about the bucket.
    if code == "" and any(word in message for word in _BY_WORDS[0][0]):
        status = 0
    if code in _BY_CODE:
        return StoreError(f"{where}: {_BY_CODE[code]} ({code})", temporary=code in _TEMPORARY_CODES)
    if status in _BY_STATUS:
        return StoreError(f"{where}: {_BY_STATUS[status]} ({code or status})")
    if status:
        temporary = status >= 500 or status in _TEMPORARY_STATUSES or code in _TEMPORARY_CODES
        advice = "the server is busy or failing; try again later" if temporary else "the server refused the request"
        return StoreError(f"{where}: {advice} ({f'{status} {code}'.strip()})", temporary=temporary)
    for words, advice, temporary in _BY_WORDS:
        if any(word in message for word in words):
            return StoreError(f"{where}: {advice}", temporary=temporary)
    return StoreError(f"{where}: request failed: {message.partition('Debug source')[0][:300]}")
