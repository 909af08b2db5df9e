"""Credentials of the store on Airflow's side: an AWS connection becomes this process's environment."""

from __future__ import annotations

import os
from typing import Any

from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret

from airflow_batchinfer.errors import StoreError

_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def store_environment(store_conn_id: str) -> dict[str, str]:
    """What boto3's chain needs in the environment to act as an AWS connection of Airflow.

    Roles named in the connection are assumed here; what comes of it lives as long as the role allows
    (one hour, if the connection does not say otherwise), so a task that runs for longer needs a role of
    its own instead (pod identity, instance profile). The secrets are masked in Airflow's logs.

    Raises:
        StoreError: there is no such connection, or it gives no credentials.
    """
    hook: AwsGenericHook[Any] = AwsGenericHook(aws_conn_id=store_conn_id, client_type="s3")
    try:
        hook.get_connection(store_conn_id)
    except AirflowNotFoundException as error:
        raise StoreError(
            f"`store_conn_id`: there is no connection {store_conn_id!r}; create one of type `aws`"
        ) from error
    credentials = hook.get_session().get_credentials()
    if credentials is None:
        raise StoreError(f"`store_conn_id`: connection {store_conn_id!r} gives no credentials")
    frozen = credentials.get_frozen_credentials()
    found = {
        "AWS_ACCESS_KEY_ID": frozen.access_key,
        "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
        "AWS_SESSION_TOKEN": frozen.token,
        "AWS_DEFAULT_REGION": hook.region_name,
        "AWS_ENDPOINT_URL_S3": hook.conn_config.get_service_endpoint_url("s3"),
    }
    for name in _CREDENTIALS:
        if found[name]:
            mask_secret(found[name])
    return {name: value for name, value in found.items() if value}


def use_connection(store_conn_id: str) -> None:
    """Make boto3, Arrow and child processes of this process act as an AWS connection.

    Meant for a task's own process, before it opens a store. Nothing of it reaches XCom, rendered fields
    or the plan.
    """
    environment = store_environment(store_conn_id)
    for name in _CREDENTIALS:  # a token left from other credentials would make these invalid
        os.environ.pop(name, None)
    os.environ.update(environment)
