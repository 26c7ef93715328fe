"""Settings are checked when they are read, and the message says which one and what to do."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import SettingsError
from batchyard.lines.body_policy import BodyPolicy
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def mail_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_SMTP__HOST", "mail.example")


def test_a_sender_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_SMTP__SENDER", "Batchyard <me@example.com>, you@example.com")

    with pytest.raises(SettingsError, match="BATCHYARD_SMTP__SENDER"):
        read_settings()


def test_a_machine_whose_name_makes_no_address_needs_a_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or every e-mail would be refused, one by one."""
    monkeypatch.setattr(socket, "gethostname", lambda: "my_host")

    with pytest.raises(SettingsError, match="BATCHYARD_SMTP__SENDER"):
        read_settings()


def test_the_default_sender_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.example")

    assert read_settings().smtp.from_address == "batchyard@node-7.example"


_LIMITS = (
    *("active_batches", "enqueued_requests", "enqueued_tokens", "batches_per_hour"),
    "stored_bytes",
)


@pytest.mark.parametrize("name", _LIMITS)
def test_none_is_no_limit_in_a_variable_and_in_the_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As it is with `batchyard tenants quota`."""
    config = tmp_path / "batchyard.toml"
    monkeypatch.setenv("BATCHYARD_CONFIG", str(config))
    config.write_text(f"[quota]\n{name} = 'none'\n")
    assert getattr(read_settings().quota, name) is None

    config.write_text(f"[quota]\n{name} = 7\n")
    assert getattr(read_settings().quota, name) == 7
    monkeypatch.setenv(f"BATCHYARD_QUOTA__{name.upper()}", "none")
    assert getattr(read_settings().quota, name) is None


def test_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_SMTP__PASSWORD", "canary-5")
    monkeypatch.setenv("BATCHYARD_SMTP__PORT", "no number")

    with pytest.raises(SettingsError) as failure:
        read_settings()

    assert "BATCHYARD_SMTP__PORT" in str(failure.value)
    assert "canary-5" not in str(failure.value)


def test_a_tenant_in_two_cache_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_CACHE_GROUPS", '{"x": ["alice", "alice"], "y": ["bob", "alice"]}')
    with pytest.raises(SettingsError, match=r"BATCHYARD_CACHE_GROUPS: .*one group only: alice"):
        read_settings()


def test_the_rules_for_bodies_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_BODIES__ALLOWED_FIELDS", '["chat_template", "image_embeds"]')
    monkeypatch.setenv("BATCHYARD_BODIES__MEDIA_DOMAINS", '["Media.example.org", "10.0.0.7"]')
    monkeypatch.setenv("BATCHYARD_BODIES__MAX_CHOICES", "128")

    assert read_settings().bodies.to_policy() == BodyPolicy(
        allowed_fields=frozenset({"chat_template", "image_embeds"}),
        media_domains=frozenset({"media.example.org", "10.0.0.7"}),
        max_choices=128,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALLOWED_FIELDS", '["chat_templates"]'),
        ("MEDIA_DOMAINS", '["https://media.example.org"]'),
        ("MEDIA_DOMAINS", '["media.example.org:8080"]'),
        ("MEDIA_DOMAINS", '["*"]'),
        ("MEDIA_DOMAINS", '["--api-key"]'),
        ("MAX_CHOICES", "0"),
    ],
)
def test_a_rule_for_bodies_that_means_nothing_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BATCHYARD_BODIES__{name}", value)

    with pytest.raises(SettingsError, match=f"BATCHYARD_BODIES__{name}"):
        read_settings()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        ("not a certificate", "it has no certificates in PEM"),
        ("", "it has no certificates in PEM"),
    ],
)
def test_a_file_of_authorities_that_cannot_be_used_stops_the_start(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    """Otherwise every connection would fail, one by one."""
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(
        SettingsError, match=rf"BATCHYARD_CA_FILE: .*ca\.pem cannot be used: {reason}"
    ):
        read_settings(ca_file=tmp_path / "ca.pem")


@pytest.mark.parametrize(
    "url", ["batches.example.org", "https://me:pw@host/", "https://host/?key=1", "ftp://host"]
)
def test_a_public_url_that_is_no_address_for_people_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"BATCHYARD_PUBLIC_URL: .*https://batches\.example"):
        read_settings(public_url=url)


@pytest.mark.parametrize("url", ["https://me:canary@host/", "https://host/?key=canary"])
def test_the_password_or_query_of_a_public_url_is_not_in_its_refusal(url: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings(public_url=url)
    assert "canary" not in str(raised.value)


def test_the_page_of_a_batch_is_below_the_public_url() -> None:
    settings = read_settings(public_url="https://host.example/yard/")
    assert settings.page_of("batch_1") == "https://host.example/yard/batches/batch_1"
    assert read_settings().page_of("batch_1") is None


def test_an_empty_home_is_not_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", "")
    with pytest.raises(SettingsError, match=r"BATCHYARD_HOME: .* name a folder"):
        read_settings()


@pytest.mark.parametrize(
    "place",
    ["gcs://bucket", "hf://datasets/me/mine", "S3://bucket", "s3:/bucket", "az://", "data", ""],
)
def test_a_place_that_each_flow_run_would_find_elsewhere_is_no_object_store(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, which is deleted at its end; the batch would wait for its input."""
    monkeypatch.setenv("BATCHYARD_STORAGE", place)
    with pytest.raises(SettingsError, match=r"BATCHYARD_STORAGE: .* the absolute path of a folder"):
        read_settings()


@pytest.mark.parametrize("url", ["sqlite:///own.db", "sqlite+aiosqlite:///a/own.db"])
def test_a_database_that_each_flow_run_would_find_elsewhere_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", url)
    with pytest.raises(SettingsError, match=r"BATCHYARD_DATABASE_URL: .* not absolute") as refused:
        read_settings()
    assert "own.db" not in str(refused.value)


@pytest.mark.parametrize(
    "place", ["/srv/batches", "~/batches", "s3://bucket", "s3://bucket/a/b", "az://b/a", "gs://b"]
)
def test_a_folder_or_a_bucket_may_be_the_object_store(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_STORAGE", place)
    assert read_settings().storage == place
