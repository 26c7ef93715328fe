"""Keys of the API on the command line, and the one that an installation makes for itself."""

from __future__ import annotations

import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from batchyard.cli.tenants.keys import end_of_key
from batchyard.cli.tenants.local_key import local_key_file
from batchyard.errors import SettingsError
from tests.cli.conftest import Ended, with_services, with_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Ended]


def tenant_of(secret: str) -> str | None:
    holder = with_store(lambda store: store.api_keys.holder_of(secret))
    return None if holder is None else holder.tenant


def key_id(ended: Ended) -> str:
    """Of the key that the command made."""
    return next(word for word in ended.stderr.split() if word.startswith("key_"))


# -- batchyard keys ------------------------------------------------------------------------------


def test_a_new_key_is_all_that_goes_to_standard_output(alone: Run) -> None:
    """So that a script can take it as it is."""
    ended = alone("keys", "create", "laptop", "--tenant", "search")
    assert ended.status == 0
    assert tenant_of(ended.stdout.removesuffix("\n")) == "search"


def test_a_key_is_the_default_tenants_unless_said(alone: Run) -> None:
    """As are the batches of ``batchyard submit``."""
    assert tenant_of(alone("keys", "create", "laptop").stdout.strip()) == "default"


def test_the_list_has_every_key_and_no_secret(alone: Run) -> None:
    secret = alone("keys", "create", "laptop").stdout.strip()
    other = alone("keys", "create", "[red]ci\x1b[2J", "--tenant", "search")
    shown = alone("keys", "list").stdout
    lines = {line.split()[0]: line for line in shown.splitlines()[1:]}
    second = lines.pop(key_id(other))
    # Keys of the same second come in any order.
    (first,) = lines.values()
    assert secret not in shown
    assert secret[:10] in first
    assert {"default", "laptop", "never", "valid"} <= set(first.split())
    assert "[red]ci�[2J" in second


def test_the_list_may_be_of_one_tenant(alone: Run) -> None:
    alone("keys", "create", "laptop")
    mine = key_id(alone("keys", "create", "ci", "--tenant", "search"))
    (line,) = alone("keys", "list", "--tenant", "search").stdout.splitlines()[1:]
    assert line.startswith(mine)


def test_a_revoked_key_opens_nothing(alone: Run) -> None:
    made = alone("keys", "create", "laptop")
    ended = alone("keys", "revoke", key_id(made))
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert tenant_of(made.stdout.strip()) is None
    assert alone("keys", "list").stdout.rstrip().endswith("revoked")


def test_a_key_that_nobody_made_cannot_be_revoked(alone: Run) -> None:
    ended = alone("keys", "revoke", "key_0")
    assert (ended.status, ended.stderr) == (
        4,
        "batchyard: No API key found with id 'key_0'.\n",
    )


def test_the_list_says_what_a_key_allows_and_when_it_ends(alone: Run) -> None:
    for options in (
        (),
        ("--operator", "--read-only", "--expires-in", "30d"),
        ("--read-only", "--expires-in", "2999-12-31"),
    ):
        assert alone("keys", "create", "laptop", *options).status == 0
    lines = alone("keys", "list").stdout.splitlines()[1:]
    assert any("operator, read-only" in each and "expires in" in each for each in lines)
    assert any("tenant, read-only" in each for each in lines)
    assert any(" tenant " in each and each.rstrip().endswith("valid") for each in lines)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("45m", 1_000_000_000 + 45 * 60),
        ("12h", 1_000_000_000 + 12 * 3600),
        ("30d", 1_000_000_000 + 30 * 86_400),
        ("2001-09-09", 1_000_080_000),  # the end of the day in which 1,000,000,000 is
    ],
)
def test_the_end_of_a_key_is_a_duration_or_the_end_of_a_day(text: str, end: int) -> None:
    assert end_of_key(text, 1_000_000_000) == end


@pytest.mark.parametrize(
    "text", ["", "30", "0d", "-1d", "2001-09-08", "2027-02-30", "9999-12-31", "01/02/2027", "3w"]
)
def test_an_end_that_is_none_is_refused_before_a_key_is_made(alone: Run, text: str) -> None:
    ended = alone("keys", "create", "laptop", "--expires-in", text)
    assert (ended.status, ended.stdout) == (2, "")
    assert "--expires-in" in ended.stderr
    assert alone("keys", "list").stdout.count("laptop") == 0


# -- the local key -------------------------------------------------------------------------------


def test_a_new_home_gets_a_key_for_its_owner_alone(alone: Run, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "home")
    path = with_services(local_key_file)
    assert path == tmp_path / "home" / "api.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tenant_of(path.read_text().strip()) == "default"


def test_the_local_key_stays_the_same(alone: Run) -> None:
    path = with_services(local_key_file)
    assert path
    before = path.read_text()
    assert with_services(local_key_file) == path
    assert path.read_text() == before
    assert len(alone("keys", "list").stdout.splitlines()) == 2


def test_a_new_login_link_logs_in_once(alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the page of `batchyard up` or `serve`, at the port or the address of this machine."""
    ended = alone("keys", "login", "--port", "9")
    link, _, rest = ended.stdout.partition(" ")
    address, _, code = link.partition("?code=")
    assert (address, rest) == ("http://127.0.0.1:9/login", "(logs in once, within 10 minutes)\n")
    assert with_store(lambda store: store.sessions.redeem(code)) is not None
    assert with_store(lambda store: store.sessions.redeem(code)) is None
    monkeypatch.setenv("BATCHYARD_PUBLIC_URL", "https://batches.example.org")
    assert alone("keys", "login").stdout.startswith("https://batches.example.org/login?code=")


def test_without_a_local_key_there_is_no_login_link(alone: Run, tmp_path: Path) -> None:
    alone("keys", "create", "laptop")
    ended = alone("keys", "login")
    assert (ended.status, ended.stdout) == (4, "")
    assert "batchyard keys create" in ended.stderr


def test_who_makes_keys_gets_no_local_one(alone: Run, tmp_path: Path) -> None:
    alone("keys", "create", "laptop")
    assert with_services(local_key_file) is None
    assert not (tmp_path / "home" / "api.key").exists()


def test_a_local_key_that_was_revoked_is_not_made_again(alone: Run) -> None:
    """Neither beside its file nor without it."""
    path = with_services(local_key_file)
    assert path
    alone("keys", "revoke", alone("keys", "list").stdout.splitlines()[1].split()[0])
    assert with_services(local_key_file) is None
    path.unlink()
    assert with_services(local_key_file) is None


def test_a_local_key_that_was_lost_is_made_again(alone: Run) -> None:
    """As after a crash between the database and the file."""
    path = with_services(local_key_file)
    assert path
    path.unlink()
    assert with_services(local_key_file) == path
    assert tenant_of(path.read_text().strip()) == "default"


def test_of_two_processes_at_once_one_makes_the_local_key(
    alone: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's is revoked."""
    path = tmp_path / "home" / "api.key"

    def too_late(place: Path, secret: str) -> bool:
        place.write_text(alone("keys", "create", "the other's").stdout)
        return False

    monkeypatch.setattr("batchyard.cli.tenants.local_key._keep", too_late)

    assert with_services(local_key_file) == path
    assert tenant_of(path.read_text().strip()) == "default"
    states = [line.split()[-1] for line in alone("keys", "list").stdout.splitlines()[1:]]
    assert sorted(states) == ["revoked", "valid"]


def test_a_key_file_that_cannot_be_read_is_a_clear_error(alone: Run, tmp_path: Path) -> None:
    (tmp_path / "home" / "api.key").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"api\.key cannot be read"):
        with_services(local_key_file)
