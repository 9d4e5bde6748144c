"""What can go wrong with a store, each in one line that a person can act on.

Both functions are pure: they turn what the system or the server said into what to do about it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping

from packtrain.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_NOT_FOUND, NotFound, PacktrainError


class StoreError(PacktrainError):
    """`temporary`: the same call may well succeed later, so a caller that can wait should.

    What will not pass by itself (wrong keys, no such bucket) is the caller's to mend.
    """

    exit_code = EXIT_MISTAKE

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        if temporary:
            self.exit_code = EXIT_FAILED


class ObjectNotFound(StoreError, NotFound):
    exit_code = EXIT_NOT_FOUND


_FULL = "the disk is full: free some space, or choose a store with more"
_READ_ONLY = "the file system is read-only: remount it for writing, or choose another store"
_FORBIDDEN = "this user may not do that: check owner and mode, or choose another store"
_SYSTEM: Mapping[int, tuple[str, bool]] = {
    errno.ENOSPC: (_FULL, True),
    errno.EDQUOT: ("the disk quota is used up: free some space, or ask for more", True),
    errno.EROFS: (_READ_ONLY, False),
    errno.EACCES: (_FORBIDDEN, False),
    errno.EPERM: (_FORBIDDEN, False),
    errno.EIO: ("the disk or the network mount failed: look at `dmesg`", True),
    errno.ESTALE: ("the network mount went stale: mount it again", True),
    errno.ETIMEDOUT: ("the network mount does not answer", True),
    errno.EHOSTDOWN: ("the network mount does not answer", True),
    errno.EMFILE: ("too many open files: raise `ulimit -n`", True),
    errno.ENFILE: ("too many open files on this machine", True),
    errno.ENAMETOOLONG: ("a name in this key is too long for the file system", False),
    errno.ENOTDIR: ("a file stands where a directory is needed: an object cannot lie below another", False),
    errno.EISDIR: ("a directory stands where a file is needed: other objects lie below this key", False),
    errno.ENOENT: ("there is no such file or directory", False),
}


def explain_system(error: OSError, where: str) -> StoreError:
    """The failure of a system call on the file or directory `where`."""
    number = error.errno or 0
    said = os.strerror(number) if number else str(error)
    advice, temporary = _SYSTEM.get(number, (said, False))
    return StoreError(f"{where}: {advice}", temporary=temporary)


_CODE = re.compile(r"<Code>\s*([A-Za-z]+)\s*</Code>")
_STATUS = re.compile(r"status code: (\d{3})")


def code_of(said: str) -> str:
    """S3's own name of the error, such as `NoSuchKey`; empty where the server gave none."""
    match = _CODE.search(said)
    return match[1] if match else ""


def status_of(said: str) -> int:
    match = _STATUS.search(said)
    return int(match[1]) if match else 0


def tells_of_absence(said: str) -> bool:
    """Whether this 404 is about an object, and not about the bucket or an upload."""
    return code_of(said) in ("", "NoSuchKey", "NotFound")


_CLOCK = "the server says this machine's clock is off: set it (`timedatectl set-ntp true`), then try again"
_EXPIRED = "the session token is not valid (any more): renew the keys and AWS_SESSION_TOKEN"
_REGION = "the bucket lies in another region: set AWS_REGION to it"
_TOLD: Mapping[str, str] = {
    "InvalidAccessKeyId": "the server does not know the key: check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "the server refused the secret key: check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "the server refused the keys: check them and what they may do in this bucket",
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "NoSuchBucket": "the bucket does not exist: create it, or correct its name",
    "InvalidBucketName": "the server does not accept this name for a bucket: correct it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "QuotaExceeded": "the bucket's quota is used up: delete something, or ask for more",
}
_TOLD_BY_STATUS: Mapping[int, str] = {
    301: _REGION,
    401: _TOLD["AccessDenied"],
    403: "the server refused: check the keys, what they may do in this bucket, and this machine's clock",
}
# An upload is forgotten when its completion was acknowledged but the acknowledgement got lost.
_TEMPORARY_CODES = {"RequestTimeout", "NoSuchUpload", "QuotaExceeded"}
_TEMPORARY_STATUSES = {408, 409, 429}


def explain_server(said: str, where: str) -> StoreError:
    """The failure of a request to a bucket, from the text that obstore made of it."""
    code, status = code_of(said), status_of(said)
    temporary = status >= 500 or status in _TEMPORARY_STATUSES or code in _TEMPORARY_CODES
    if code in _TOLD:
        return StoreError(f"{where}: {_TOLD[code]} ({code})", temporary=code in _TEMPORARY_CODES)
    if status in _TOLD_BY_STATUS:
        return StoreError(f"{where}: {_TOLD_BY_STATUS[status]} ({code or status})")
    if status:
        hint = "the server is busy or out of order; try again later" if temporary else "the server refused"
        return StoreError(f"{where}: {hint} ({status} {code})".replace(" )", ")"), temporary=temporary)
    return _explain_connection(said, where)


def _explain_connection(said: str, where: str) -> StoreError:
    if "169.254.169.254" in said or "InstanceCredentials" in said:
        return StoreError(
            f"{where}: this machine's metadata service gives no keys: attach an instance role, "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            temporary=True,
        )
    if "certificate" in said:
        return StoreError(
            f"{where}: the server's certificate is not trusted: check AWS_ENDPOINT_URL and the system's roots"
        )
    if "without LOCATION" in said:
        return StoreError(f"{where}: {_REGION}")
    if "invalid path" in said:
        return StoreError(
            f"{where}: holds an object that others named with an empty, '.' or '..' part: "
            "remove it, or use a prefix of your own"
        )
    if "dns error" in said:
        return StoreError(
            f"{where}: the server's name is unknown here: check AWS_ENDPOINT_URL and the network",
            temporary=True,
        )
    if "kind: Connect" in said:
        return StoreError(
            f"{where}: the server cannot be reached: check AWS_ENDPOINT_URL and the network", temporary=True
        )
    if any(word in said for word in ("HTTP error", "reqwest::Error", "HttpError", "timed out", "TimedOut")):
        return StoreError(f"{where}: the connection broke or took too long; try again later", temporary=True)
    return StoreError(f"{where}: the request failed: {said.partition('Debug source')[0][:300]}")
