"""Our signatures are those of AWS's own library, whatever keys, headers and questions are made of."""

from __future__ import annotations

import calendar
import time
from urllib.parse import parse_qs, quote, urlsplit

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._examples import examples

from comfyfleet.files.s3_storage import S3Bucket, S3Credentials, presigned

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=20)
PARTS = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f/"), min_size=1, max_size=12
).filter(lambda part: part not in (".", ".."))
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@settings(max_examples=examples(200))
@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    key=st.lists(PARTS, min_size=1, max_size=4).map("/".join),
    headers=st.dictionaries(
        st.sampled_from(
            ["content-type", "content-length", "if-none-match", "x-amz-checksum-sha256", "x-amz-meta-a"]
        ),
        VALUES,
    ),
    query=st.dictionaries(
        st.sampled_from(["response-content-type", "response-content-disposition", "prefix", "list-type"]),
        TEXT.filter(bool),
    ),
    path_style=st.booleans(),
    endpoint=st.sampled_from(["https://storage.example", "http://127.0.0.1:8333"]),
    token=st.none() | VALUES,
)
def test_a_signature_is_the_one_that_the_library_of_aws_makes(
    method: str,
    key: str,
    headers: dict[str, str],
    query: dict[str, str],
    path_style: bool,
    endpoint: str,
    token: str | None,
) -> None:
    bucket = S3Bucket(endpoint, "eu-central-1", "fleet", path_style)
    scheme, _, host = endpoint.partition("://")
    place = f"{endpoint}/fleet" if path_style else f"{scheme}://fleet.{host}"
    request = AWSRequest(method, f"{place}/{quote(key, safe='/-._~')}", headers=dict(headers), params=query)
    signer = S3SigV4QueryAuth(
        BotoCredentials("AKIAEXAMPLE", "secret/+=", token), "s3", "eu-central-1", expires=900
    )
    signer.add_auth(request)
    theirs = parse_qs(urlsplit(request.url).query, keep_blank_values=True)
    now = calendar.timegm(time.strptime(theirs["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ"))
    ours = presigned(
        bucket,
        S3Credentials("AKIAEXAMPLE", "secret/+=", token),
        method,
        key,
        now=now,
        expires_s=900,
        headers=headers,
        query=query,
    )
    assert urlsplit(ours)[:3] == urlsplit(request.url)[:3]
    assert parse_qs(urlsplit(ours).query, keep_blank_values=True) == theirs
