"""Property-based requests, made from our own OpenAPI document."""

from typing import Any

import schemathesis
from conftest import running
from fake_engine import FakeEngine, script_of
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    status_code_conformance,
)

from ds41jax.tokenizer import Tokenizer

CHECKS = [status_code_conformance, content_type_conformance]


def test_api(official: Tokenizer) -> None:
    """Whatever fits the document, or nearly fits it, is answered as the document says."""
    engine = FakeEngine(official, script_of(official, "x"))
    with running(engine) as url:
        document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        tried = 0
        for result in document.get_all_operations():
            operation = result.ok()
            _check(operation.as_strategy())
            if operation.body:
                _check(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
            tried += 1
        assert tried == 14 and not engine.open  # all but the document itself


def _check(cases: Any) -> None:
    @given(case=cases)
    @settings(
        max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    def check(case: Any) -> None:
        response = case.call()
        about_output = response.status_code == 500 and "The model" in response.text
        checks = CHECKS if about_output else [not_a_server_error, *CHECKS]
        case.validate_response(response, checks=checks)

    check()
