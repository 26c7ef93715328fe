"""Whose prompts meet in an engine's cache: the salt that the requests of each batch carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.engine.stub.stub import StubEngine
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


async def salts_of(yard: Yard, *tenants: str) -> list[set[str | None]]:
    """The salts that the engine was given for a batch of each tenant, in this order."""
    salts = []
    for number, tenant in enumerate(tenants):
        yard.use(StubEngine(max_num_seqs=8))
        lines = [chat_line(f"{number}-{index}") for index in range(3)]
        await yard.run(lines, tenant=tenant)
        salts.append({request.of_batch.cache_salt for request in yard.engine.log})
    return salts


async def test_each_tenant_has_its_own_cache_in_all_its_batches(yard: Yard) -> None:
    first, second, again = await salts_of(yard, "alice", "bob", "alice")
    assert first == again
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)
    assert None not in first | second


async def test_all_tenants_share_one_cache_where_the_operator_says_so(yard: Yard) -> None:
    yard.set(cache_shared_by="all")
    assert await salts_of(yard, "alice", "bob") == [{None}, {None}]


async def test_a_group_shares_one_cache_and_keeps_others_out(yard: Yard) -> None:
    yard.set(cache_groups={"search": ["alice", "bob"]})
    alice, bob, carol = await salts_of(yard, "alice", "bob", "carol")
    assert alice == bob
    assert alice.isdisjoint(carol)


async def test_a_group_and_a_tenant_of_the_same_name_are_not_the_same(yard: Yard) -> None:
    yard.set(cache_groups={"carol": ["alice"]})
    alice, carol = await salts_of(yard, "alice", "carol")
    assert alice.isdisjoint(carol)
