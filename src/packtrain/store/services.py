"""The services that keep buckets: Amazon's S3 and all that speak it, Google Cloud Storage, Azure Blob Storage.

Each reads its keys as its own tools do: from the environment, from files that the environment names, or from the
machine's own role. Nothing of it is ever in a URL.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from packtrain.errors import Mistake
from packtrain.store.aws_keys import (
    DEFAULT_REGION,
    KEY_VARIABLES,
    AwsKeys,
    SdkKeys,
    checked_server,
    named_profile,
    needs_sdk,
    sdk_keys,
)
from packtrain.store.errors import NoKeys
from packtrain.store.uploads import UploadClient
from packtrain.system import in_home

if TYPE_CHECKING:
    from obstore.store import AzureConfig, GCSConfig, S3Config

BucketClient = S3Store | GCSStore | AzureStore

_METADATA_SECONDS = 1.0
_METADATA = "169.254.169.254"
# Set on EKS, ECS and wherever else a machine has an identity of its own; obstore uses them by itself.
_AWS_IDENTITIES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_GOOGLE_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
_GCLOUD_FILE = ".config/gcloud/application_default_credentials.json"


class BucketService(ABC):
    """A service as this process can use it: the server and the keys for it."""

    scheme: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    """The variables with which another machine opens the same bucket, as this process does."""
    endpoints: ClassVar[tuple[str, ...]]
    """The variables that name the server: the first one that is set counts, and the others are for other services."""
    endpoint: str | None

    @classmethod
    def passed(cls, environment: Mapping[str, str]) -> set[str]:
        """Return the names of the variables that other machines need to open a bucket."""
        server = next((name for name in cls.endpoints if environment.get(name)), None)
        return {name for name in (*cls.variables, server) if name is not None and name in environment}

    @property
    def is_plain(self) -> bool:
        """True if no request of obstore goes over TLS: the server has none, and no other one is asked for keys."""
        return self._has_keys and (self.endpoint or "").startswith("http://")

    @property
    @abstractmethod
    def _has_keys(self) -> bool:
        """True if this process hands obstore the keys."""

    @property
    def key_source(self) -> str | None:
        """Name what gives this process keys that other machines do not find by themselves; None if it is not known."""
        return None

    @abstractmethod
    def client(self, bucket: str, prefix: str | None, options: Any, retries: Any) -> BucketClient:
        """Return obstore's client of a bucket, with its options for connections and retries."""

    def uploads(self, bucket: str, answer_seconds: float) -> UploadClient | None:  # noqa: ARG002
        """Return a client for the bucket's unfinished uploads; None if nobody but the service can remove them."""
        return None


@dataclass(frozen=True)
class S3Service(BucketService):
    """Without `keys` and `sdk` obstore uses the machine's own role."""

    scheme = "s3"
    variables = (
        *KEY_VARIABLES, "AWS_REGION", "AWS_DEFAULT_REGION",
        # How obstore writes to a bucket whose owner asks for it.
        "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_SSE_BUCKET_KEY_ENABLED", "AWS_SSE_CUSTOMER_KEY_BASE64",
        "AWS_REQUEST_PAYER", "AWS_CHECKSUM_ALGORITHM", "AWS_UNSIGNED_PAYLOAD", "AWS_SKIP_SIGNATURE",
    )  # fmt: skip
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

    region: str
    endpoint: str | None = None
    keys: AwsKeys | None = field(default=None, repr=False)
    sdk: SdkKeys | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> S3Service:
        endpoint = checked_endpoint(environment, *cls.endpoints)
        region = _first(environment, "AWS_REGION", "AWS_DEFAULT_REGION")
        keys = AwsKeys.of(environment)
        sdk = sdk_keys(named_profile(environment)) if needs_sdk(environment) else None
        if sdk is not None:
            return cls(sdk.region, endpoint or sdk.endpoint, None, sdk)
        service = cls(region or DEFAULT_REGION, endpoint, keys)
        if keys is None and not service._has_role(environment):
            raise NoKeys(
                "no keys for the store; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "(`aws configure export-credentials --profile NAME --format env` prints a profile's keys)"
            )
        return service

    @property
    def _has_keys(self) -> bool:
        return self.keys is not None or self.sdk is not None

    @property
    def key_source(self) -> str | None:
        return None if self.sdk is None else self.sdk.title

    def _has_role(self, environment: Mapping[str, str]) -> bool:
        """True if the machine seems to have a role of its own.

        Where there is no metadata service, obstore would ask for it for minutes: so only Amazon's own S3 counts, and
        only if the service can be reached. Whoever names the service has one, for whatever server.
        """
        if any(environment.get(name) for name in _AWS_IDENTITIES):
            return True
        named = environment.get("AWS_METADATA_ENDPOINT")
        host = urlsplit(self.endpoint or "https://s3.amazonaws.com").hostname or ""
        disabled = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
        if disabled or not (named or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))):
            return False
        return _answers(named or f"http://{_METADATA}")

    def client(self, bucket: str, prefix: str | None, options: Any, retries: Any) -> BucketClient:
        config: S3Config = {
            "region": self.region,
            "virtual_hosted_style_request": False,
            # Servers differ in how they want a bulk deletion; this store deletes one object at a time anyway.
            "disable_bulk_delete": True,
        }
        if self.endpoint is not None:
            config["endpoint"] = self.endpoint
        if self.keys is not None:
            config["access_key_id"] = self.keys.access_key
            config["secret_access_key"] = self.keys.secret_key
            if self.keys.session_token is not None:
                config["session_token"] = self.keys.session_token
        return S3Store(
            bucket,
            prefix=prefix,
            config=config,
            client_options=options,
            retry_config=retries,
            credential_provider=self.sdk,
        )

    def uploads(self, bucket: str, answer_seconds: float) -> UploadClient | None:
        keys = self.keys
        if self.sdk is not None:
            get_keys = self.sdk.current
        elif keys is not None:
            get_keys = lambda: keys  # noqa: E731 - in one line with the other source
        else:  # only obstore knows the keys
            return None
        server = self.endpoint or f"https://s3.{self.region}.amazonaws.com"
        return UploadClient(f"{server.rstrip('/')}/{bucket}", self.region, get_keys, answer_seconds)


@dataclass(frozen=True)
class GoogleService(BucketService):
    """obstore reads the key files of the environment, and those of gcloud, by itself."""

    scheme = "gs"
    variables = (*_GOOGLE_FILES, "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN")
    endpoints = ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL")

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> GoogleService:
        emulator = environment.get("STORAGE_EMULATOR_HOST") or None
        if emulator is not None and "://" not in emulator:
            environment = {**environment, "STORAGE_EMULATOR_HOST": f"http://{emulator}"}
        endpoint = checked_endpoint(environment, *cls.endpoints)
        token = environment.get("GOOGLE_BEARER_TOKEN") or ("emulator" if emulator else None)
        named = [(name, environment[name]) for name in _GOOGLE_FILES if environment.get(name)]
        for name, path in named:
            if not Path(path).is_file():
                raise Mistake(f"{name}: there is no file {path}; correct it, or unset it for the machine's own account")
        has_keys = token or named or environment.get("GOOGLE_SERVICE_ACCOUNT_KEY") or in_home(_GCLOUD_FILE).is_file()
        metadata = environment.get("GCE_METADATA_HOST") or _METADATA
        if not has_keys and not _answers(f"http://{metadata}"):
            raise NoKeys(
                "no keys for the store; set GOOGLE_APPLICATION_CREDENTIALS to a key file, "
                "or run `gcloud auth application-default login`"
            )
        return cls(endpoint, token)

    @property
    def _has_keys(self) -> bool:
        return self.token is not None

    def client(self, bucket: str, prefix: str | None, options: Any, retries: Any) -> BucketClient:
        config: GCSConfig = {}
        if self.endpoint is not None:
            config["base_url"] = self.endpoint
        if self.token is not None:
            config["bearer_token"] = self.token
        return GCSStore(bucket, prefix=prefix, config=config, client_options=options, retry_config=retries)


@dataclass(frozen=True)
class AzureService(BucketService):
    """A container of a storage account. Without a key or a signature obstore uses the identity that it finds."""

    scheme = "az"
    variables = (
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST",
    )  # fmt: skip
    endpoints = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")

    account: str
    endpoint: str | None = None
    key: str | None = field(default=None, repr=False)
    signature: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> AzureService:
        account = _first(environment, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
        if account is None:
            raise Mistake("the storage account is not known; set AZURE_STORAGE_ACCOUNT_NAME")
        endpoint = checked_endpoint(environment, *cls.endpoints)
        key = _first(environment, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY")
        signature = _first(environment, "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
        identities = ("AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_TOKEN", "AZURE_USE_AZURE_CLI")
        has_keys = key or signature or _first(environment, *identities)
        managed = _first(environment, "AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT")
        if not has_keys and not managed and not _answers(f"http://{_METADATA}"):
            raise NoKeys(
                "no keys for the store; set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, "
                "or AZURE_USE_AZURE_CLI=true after `az login`"
            )
        return cls(account, endpoint, key, signature)

    @property
    def _has_keys(self) -> bool:
        return self.key is not None or self.signature is not None

    def client(self, bucket: str, prefix: str | None, options: Any, retries: Any) -> BucketClient:
        config: AzureConfig = {"account_name": self.account}
        if self.endpoint is not None:
            config["endpoint"] = self.endpoint
        if self.key is not None:
            config["account_key"] = self.key
        elif self.signature is not None:
            config["sas_key"] = self.signature.removeprefix("?")
        return AzureStore(bucket, prefix=prefix, config=config, client_options=options, retry_config=retries)


SERVICES: dict[str, type[S3Service | GoogleService | AzureService]] = {
    service.scheme: service for service in (S3Service, GoogleService, AzureService)
}


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def checked_endpoint(environment: Mapping[str, str], *variables: str) -> str | None:
    """Return the server that the first of these variables names; refuse one that has keys in it."""
    variable = next((name for name in variables if environment.get(name)), None)
    return None if variable is None else checked_server(variable, environment[variable])


def _answers(url: str) -> bool:
    """True if somebody listens there; a metadata service is a hop away, or nowhere."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 80), _METADATA_SECONDS).close()
    except OSError:
        return False
    return True
