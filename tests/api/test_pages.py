"""What a client may ask of a list."""

from __future__ import annotations

import pytest

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.pages import Paging, read_paging, to_list_page
from batchyard.wire import FileDeleted, to_json


@pytest.mark.parametrize(
    ("query", "paging"),
    [
        ({}, Paging(20, None, "desc")),
        ({"limit": "0"}, Paging(20, None, "desc")),
        ({"limit": "100", "after": "x", "order": "asc"}, Paging(100, "x", "asc")),
        ({"limit": "", "after": "", "order": ""}, Paging(20, None, "desc")),
    ],
)
def test_a_page_is_asked_for(query: dict[str, str], paging: Paging) -> None:
    assert read_paging(query, most=100, default=20) == paging


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ({"limit": "101"}, "limit", "integer_above_max_value"),
        ({"limit": "-1"}, "limit", "integer_below_min_value"),
        ({"limit": "x"}, "limit", "invalid_type"),
        ({"limit": "1.5"}, "limit", "invalid_type"),
        ({"limit": "9" * 5000}, "limit", "invalid_type"),
        ({"order": "up"}, "order", "invalid_value"),
    ],
)
def test_what_is_no_page_is_refused(query: dict[str, str], param: str, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        read_paging(query, most=100, default=20)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


def test_an_empty_page_has_null_ids() -> None:
    page = to_json(to_list_page([], has_more=False))
    assert page == (b'{"object":"list","data":[],"first_id":null,"last_id":null,"has_more":false}')


def test_a_page_names_its_first_and_its_last() -> None:
    page = to_list_page([FileDeleted(id="a"), FileDeleted(id="b")], has_more=True)
    assert (page.first_id, page.last_id, page.has_more) == ("a", "b", True)
