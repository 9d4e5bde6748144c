"""Keys for S3: those of the environment, or what Amazon's SDK finds.

The SDK reads profiles, single sign-on, roles to assume and commands that print keys, and renews what expires. It is
loaded only if there are no keys in the environment, and something that only the SDK can read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packtrain.errors import Mistake
from packtrain.identity import install_command
from packtrain.store.errors import NOT_RENEWED, NoKeys, StoreError
from packtrain.system import in_home

if TYPE_CHECKING:
    from obstore.store import S3Credential

DEFAULT_REGION = "us-east-1"
KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_ROLES = ("iam-role", "container-role")  # of the machine itself: obstore finds them, as any other machine finds its own
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}


@dataclass(frozen=True)
class AwsKeys:
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> AwsKeys | None:
        access_key, secret_key, session_token = (environment.get(name) or None for name in KEY_VARIABLES)
        if access_key is not None and secret_key is not None:
            return cls(access_key, secret_key, session_token)
        if access_key is not None or secret_key is not None:
            missing = "AWS_SECRET_ACCESS_KEY" if access_key else "AWS_ACCESS_KEY_ID"
            raise Mistake(f"the keys for the store are incomplete; also set {missing}")
        return None


class SdkKeys:
    """Keys that the SDK has found, of a profile or of the default one. `title` names it in messages."""

    def __init__(self, profile: str | None, session: Any, credentials: Any) -> None:
        self.title, self._profile = _title(profile), profile
        self._session, self._credentials = session, credentials
        self.region: str = session.get_config_variable("region")

    @property
    def endpoint(self) -> str | None:
        """The S3 server that the profile names, if it is another one than Amazon's."""
        from botocore.configprovider import ConfiguredEndpointProvider

        config = self._session
        url: str | None = ConfiguredEndpointProvider(config.full_config, config.get_scoped_config(), "s3").provide()
        return None if url is None else checked_server(f"endpoint_url of {self.title}", url)

    @property
    def expires(self) -> datetime | None:
        """The end of the present keys; the SDK gets others before."""
        expiry: datetime | None = getattr(self._credentials, "_expiry_time", None)  # as `aws configure` reads it
        return expiry

    def current(self) -> AwsKeys:
        from botocore import exceptions

        try:
            keys = self._credentials.get_frozen_credentials()
        except (exceptions.ConnectionError, exceptions.HTTPClientError):
            raise StoreError(f"{self.title} {NOT_RENEWED}; try again later", temporary=True) from None
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            raise StoreError(_no_keys(self._profile, error)) from None
        return AwsKeys(keys.access_key, keys.secret_key, keys.token)

    def __call__(self) -> S3Credential:
        """Answer obstore. Only the SDK knows when keys end, so obstore asks again every time."""
        keys = self.current()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.session_token,
            "expires_at": datetime.now(UTC),
        }


def checked_server(source: str, text: str) -> str:
    """Return the URL of a server; refuse one that has keys in it: other machines are told of it, in files and logs."""
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        good = False
    if not good or set(text) & {*"@?"}:
        raise Mistake(f"{source}: invalid URL; use http://host:port or https://host, without keys")
    return text


def named_profile(environment: Mapping[str, str]) -> str | None:
    return environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or None


def needs_sdk(environment: Mapping[str, str]) -> bool:
    """True if the environment has no keys, but a profile, or if there are files that may have one."""
    if any(environment.get(name) for name in KEY_VARIABLES[:2]):
        return False
    has_files = any(
        (Path(environment[name]) if environment.get(name) else in_home(usual)).exists()
        for name, usual in _FILES.items()
    )
    return named_profile(environment) is not None or (has_files and find_spec("botocore") is not None)


def sdk_keys(profile: str | None) -> SdkKeys | None:
    """Return the keys of a profile, or of the default one; None if the SDK finds none.

    They are kept: stores share what it takes to get them, such as a request for the keys of a role.
    """
    return _sdk_keys(profile, frozenset(item for item in os.environ.items() if item[0].startswith("AWS_")))


@lru_cache(maxsize=4)
def _sdk_keys(profile: str | None, _environment: frozenset[tuple[str, str]]) -> SdkKeys | None:
    export = f"`aws configure export-credentials --profile {profile} --format env` prints its keys for the environment"
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError, ProfileNotFound
    except ImportError:
        raise Mistake(f"AWS_PROFILE: needs boto3; run `{install_command('aws')}`, or {export}") from None
    # What the SDK logs about a renewal that failed, with a traceback, is in the error that follows.
    logging.getLogger("botocore.credentials").addHandler(logging.NullHandler())
    try:
        session = botocore.session.Session(profile=profile)
        # Also for the request for the keys of a role. The SDK itself does not know AWS_REGION.
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or DEFAULT_REGION
        session.set_config_variable("region", region)
        credentials = session.get_credentials()
    except ProfileNotFound:
        raise Mistake(f"AWS_PROFILE: no profile {profile}; `aws configure list-profiles` lists them") from None
    except BotoCoreError as error:
        raise NoKeys(_no_keys(profile, error)) from None
    if credentials is None or (profile is None and credentials.method in _ROLES):
        return None
    return SdkKeys(profile, session, credentials)


def _title(profile: str | None) -> str:
    return f"the AWS profile {profile or 'default'}"


def _no_keys(profile: str | None, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")[:200]
    login = "aws sso login" if profile is None else f"aws sso login --profile {profile}"
    return f"{_title(profile)} gives no keys: {reason}; check it, or log in again, as with `{login}`"
