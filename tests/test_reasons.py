"""Which refusals are of one kind."""

import pytest

from pipeline.policy.reasons import kind_of


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("prompt token=1000, expected ids in [0, 320)", "prompt token=, expected ids in [0, 0)"),
        ("OVERFLOW: support=9, expected at most 8; lower top_k", "OVERFLOW: support=, expected at most 0; lower top_k"),
        ("prompt='a=1, b\n=2', expected a string", "prompt=, expected a string"),
        ("[1, {'a=': 2}], expected a JSON object", ", expected a JSON object"),
        ("INVALID: the policy of output token 17 has NaN", "INVALID: the policy of output token 0 has NaN"),
        ("x=1, expected y=2, expected z", "x=, expected y=0, expected z"),
        ("why not", "why not"),
        ("", ""),
    ],
)
def test_the_value_and_numbers_are_left_out(reason, kind):
    assert kind_of(reason) == kind
