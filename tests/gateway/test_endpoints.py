"""The table of endpoints is unique, documented and served."""

import re
from pathlib import Path

import httpx
import pytest

from rollout_gateway.endpoints import ENDPOINTS
from rollout_gateway.requests.http_request import Endpoint

ROOT = Path(__file__).parents[2]


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert found is not None
    return found[1]


def test_each_path_has_one_row() -> None:
    named = [(method, path) for endpoint in ENDPOINTS for method in endpoint.methods for path in endpoint.paths]
    assert len(named) == len(set(named))


def test_the_page_of_the_gateway_names_only_paths_that_are_served() -> None:
    """The reference lists all: it is made from the table."""
    served = {path for endpoint in ENDPOINTS for path in endpoint.paths}
    listed, _, refused = section("gateway.md", "Endpoints").partition("### Refused")
    named, absent = (set(re.findall(r"`(/[\w/]+)", text)) for text in (listed, refused))
    assert len(named) > 2 and named <= served and absent and not absent & served


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.methods[0]} {endpoint.path}")
def test_an_endpoint_is_served_under_all_its_names(client: httpx.Client, endpoint: Endpoint) -> None:
    """A method that the row does not name tells the methods that are served, and orders nothing."""
    for path in endpoint.paths:
        answer = client.request("PATCH", path)
        assert answer.status_code == 405, answer.text
        assert set(answer.headers["Allow"].split(", ")) >= set(endpoint.methods)
