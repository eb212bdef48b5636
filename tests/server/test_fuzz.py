"""schemathesis over the server's own OpenAPI description: whatever is sent, the answer comes, and
it is none of status 5xx. PAGEDKV_FUZZ_CASES cases a route, 50 if not given (make fuzz: more).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from serving import serving

from pagedkv.server import Limits

CASES = int(os.environ.get("PAGEDKV_FUZZ_CASES", "50"))
ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/fork"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def target(tokenizer_folder: Path) -> Any:
    # A short context: every answer is tiny. What is kept is kept for a second at most.
    limits = Limits(max_keep_s=1.0)
    with serving(tokenizer_folder, app_options={"limits": limits}, max_model_len=24) as served:
        schema = schemathesis.openapi.from_dict(served.client.get("/openapi.json").json())
        schema.config.base_url = served.url
        yield served, schema


def test_every_route_is_tried(target: Any) -> None:
    _, schema = target
    described = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert described == set(ROUTES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_that_is_sent_is_answered_by_an_error_of_the_server(
    target: Any, method: str, path: str
) -> None:
    served, schema = target

    seen = set()

    @given(case=schema[path][method].as_strategy())
    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # almost no name is that of the model
        response = case.call(timeout=30, headers={"host": "localhost"})
        assert response.status_code < 500, response.text
        seen.add(response.status_code)

    check()
    assert 200 in seen or path in ("/v1/models/{model}", "/v1/fork")
    served.wait_idle()
