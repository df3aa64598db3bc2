"""Rates: defaults, and files of measured ones."""

import json

import pytest

from makeway import UserError
from makeway.memory.rates import DEFAULT_RATES, RATES, Rates, read_rates

MEASURED = {
    "link_bytes_per_s": 55,
    "fetch_bytes_per_s": 50,
    "hbm_bytes_per_s": 4300,
    "flops_per_s": 344,
    "host_read_bytes_per_s": 86,
}


def written(tmp_path, document):
    path = tmp_path / "rates.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_the_default_errs_to_slow():
    assert all(vars(DEFAULT_RATES)[k] <= v for k, v in vars(RATES["h200"]).items() if k.endswith("per_s"))


def test_a_result_of_bench_link_or_its_rates_alone(tmp_path):
    assert read_rates(written(tmp_path, MEASURED)) == Rates(55, 50, 4300, 344, 86)
    assert read_rates(written(tmp_path, {"bench": "link", "rates": MEASURED})) == Rates(55, 50, 4300, 344, 86)
    with_overhead = {**MEASURED, "step_overhead_s": 0.002}
    assert read_rates(written(tmp_path, with_overhead)).step_overhead_s == 0.002


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not a JSON document"),
        ([], "holds no rates"),
        ({"bench": "link", "rates": None}, "without a GPU"),
        ({"rates": []}, "rates must be"),
        ({"link_bytes_per_s": 55}, "rates must be"),
        ({**MEASURED, "speed": 1}, "rates must be"),
        ({**MEASURED, "flops_per_s": "344"}, "flops_per_s is '344'"),
        ({**MEASURED, "flops_per_s": True}, "flops_per_s is True"),
        ({**MEASURED, "link_bytes_per_s": 1.5}, "not a whole number"),
        ({**MEASURED, "link_bytes_per_s": 0}, "must be positive"),
        ({**MEASURED, "step_overhead_s": -1.0}, "must be positive"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, document, message):
    with pytest.raises(UserError, match=message):
        read_rates(written(tmp_path, document))
    with pytest.raises(UserError, match="cannot be read"):
        read_rates(tmp_path / "absent.json")
