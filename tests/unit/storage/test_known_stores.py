"""Which servers are asked whether they would take a PUT: those that store nothing then."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config

from batchyard.locations.known_stores import is_known_store

ARN = "arn:{0}:s3:{1}:123456789012:accesspoint/mine"


def host_by_boto3(region: str, bucket: str, **options: Any) -> str:
    client = boto3.client(
        "s3",
        region_name=region,
        aws_access_key_id="k",
        aws_secret_access_key="s",
        config=Config(**options),
    )
    url = client.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "k"})
    return urlsplit(url).netloc


@pytest.mark.parametrize(
    ("partition", "region", "has_fips"),
    [
        ("aws", "us-east-1", True),
        ("aws", "ap-southeast-4", True),
        ("aws-us-gov", "us-gov-west-1", True),
        ("aws-cn", "cn-north-1", False),
        ("aws-eusc", "eusc-de-east-1", True),
    ],
)
def test_hosts_that_boto3_signs_for_are_known(partition: str, region: str, has_fips: bool) -> None:
    hosts = [
        host_by_boto3(region, bucket, use_dualstack_endpoint=dualstack, use_fips_endpoint=fips)
        for bucket in ("mine", "my.bucket", ARN.format(partition, region))
        for dualstack in (False, True)
        for fips in {False, has_fips}
    ]
    assert [host for host in hosts if not is_known_store(f"https://{host}/k?x")] == []


def test_other_endpoints_of_the_same_stores_are_known() -> None:
    accelerated = {"s3": {"use_accelerate_endpoint": True}}
    hosts = [
        host_by_boto3("eu-west-1", "mine", **accelerated),
        host_by_boto3("eu-west-1", "mine", **accelerated, use_dualstack_endpoint=True),
        "mfzwi23gnjvgw.mrap.accesspoint.s3-global.amazonaws.com",
        "s3.amazonaws.com",
        "s3-eu-west-1.amazonaws.com",
        "mine.s3-us-gov-west-1.amazonaws.com",
        "mine.s3-external-1.amazonaws.com",
        "mine.bucket.vpce-1a2b3c4d-5e6f.s3.us-east-1.vpce.amazonaws.com",
        "MINE.s3.amazonaws.com:443",
        "storage.googleapis.com",
        "my.bucket.storage.googleapis.com",
        "storage.me-central2.rep.googleapis.com",
        "account.blob.core.windows.net",
        "account.blob.core.usgovcloudapi.net",
        "account.blob.core.chinacloudapi.cn",
        "account.z12.blob.storage.azure.net",
    ]
    assert [host for host in hosts if not is_known_store(f"https://{host}/k?x")] == []


@pytest.mark.parametrize(
    "url",
    [
        "https://minio.example.com/b/k",
        "https://127.0.0.1:8333/b/k",
        "https://account.r2.cloudflarestorage.com/b/k",
        "https://s3.eu-central-1.wasabisys.com/b/k",
        # Names that only look like theirs.
        "https://s3.amazonaws.com.example.com/b/k",
        "https://s3.amazonaws.com@example.com/b/k",
        "https://evils3.amazonaws.com/b/k",
        "https://example.com/s3.amazonaws.com",
        "https://storage.googleapis.com.example.com/b/k",
        "https://xstorage.googleapis.com/b/k",
        "https://blob.core.windows.net.example.com/b/k",
        # Of the same companies, and other software.
        "https://mine.s3-website-us-east-1.amazonaws.com/k",
        "https://s3.eu-west-1.elb.amazonaws.com/k",
        "https://x--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com/k",
        "https://r-1.op-01ac.s3-outposts.us-east-1.amazonaws.com/k",
        "https://account.dfs.core.windows.net/c/k",
        # No certificate proves who answers, or it is another server of the host.
        "http://mine.s3.amazonaws.com/k",
        "https://mine.s3.amazonaws.com:9000/k",
        "multipart+https://mine.s3.amazonaws.com/k",
    ],
)
def test_other_servers_are_not_known(url: str) -> None:
    assert not is_known_store(url)
